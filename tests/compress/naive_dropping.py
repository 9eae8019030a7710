"""A reference decoder that drops tokens, in plain NumPy and float64; engines are compared with it.

It keeps all keys of a sequence and masks the dropped ones. Scores are computed one token at a time
(`naive_scores`); each later query sees the tokens that were kept last, and those that followed.
"""

from collections.abc import Callable

import numpy as np

from jaxkv.models.decoder import Decoder
from tests.compress import naive_scores
from tests.compress.naive_scores import best, best_of_layer
from tests.models.numpy_decoder import array, capped, mlp, norm, rotated

Choose = Callable[..., list[list[int]]]  # of q, k, v and the slots of each head, at a boundary


def chooser(name: str, keep: Callable[[int], int], budgets: list[int] | None = None) -> Choose:
    """The choice of a method; `budgets` of each layer that drops, where they differ."""
    score = naive_scores.SCORES[name.removeprefix("adakv_")]
    pick = best_of_layer if name.startswith("adakv_") else best

    def choose(number: int, n: int, q, k, v, turned) -> list[list[int]]:
        count = keep(n) if budgets is None else budgets[number]
        scores = score(q=q, k=k, v=v, cap=None, keep=count, turned=turned)
        return pick(scores, count)

    return choose


def decode_dropping(
    decoder: Decoder, tokens: list[int], boundaries: list[int], choose: Choose
) -> tuple[np.ndarray, list[list[list[list[int]]]]]:
    """Runs a sequence whose layers without a window drop tokens at some lengths.

    Returns:
      Logits `[S, V]` after each token, and the kept tokens by layer, length and head.
    """
    config = decoder.config
    x = config.embedding_scale * array(decoder.embedding)[tokens]
    stayed = []
    for layer, own in zip(decoder.layers, config.layers, strict=True):
        q, k, v = _heads(layer, config, norm(x, layer.attention_norm), own.rope)
        visible = np.tril(np.ones((len(x), len(x)), bool))[None].repeat(k.shape[0], axis=0)
        if own.window is not None:
            behind = np.arange(len(x))[:, None] - np.arange(len(x))[None]
            visible &= behind < own.window
        else:
            stayed.append(_drop(visible, q, k, v, boundaries, choose, len(stayed), own.rope))
        attended = _attend(q, k, v, visible)
        x = x + norm(attended @ array(layer.attention.out.weight).T, layer.attention_post_norm)
        x = x + norm(mlp(layer, config, norm(x, layer.mlp_norm)), layer.mlp_post_norm)
    head = decoder.embedding if decoder.head is None else decoder.head
    return capped(norm(x, decoder.final_norm) @ array(head).T, config.logit_soft_cap), stayed


def _drop(visible, q, k, v, boundaries, choose, number, rope) -> list[list[list[int]]]:
    """Masks dropped tokens in `visible [K, S, S]`; returns the tokens kept at each boundary."""
    K = len(k)
    there = [list(range(boundaries[0])) for _ in range(K)]
    before, found = boundaries[0], []

    def turned(vector: np.ndarray, by: int) -> np.ndarray:
        half = len(vector) // 2
        z = (vector[:half] + 1j * vector[half:]) * np.exp(
            1j * by * rope.theta ** (-np.arange(half) / half)
        )
        return np.concatenate([z.real, z.imag])

    for end in boundaries:
        there = [one + list(range(before, end)) for one in there]
        before = end
        if len(found):  # a later choice, by what is left: of methods that look at the last query
            keys = [np.stack([part[head][there[head]] for head in range(K)]) for part in (k, v)]
            own = q[[*there[0][:-1], end - 1]]
        else:
            keys, own = [part[:, :end] for part in (k, v)], q[:end]
        picked = choose(number, end, own, *keys, turned)
        there = [[one[i] for i in places] for one, places in zip(there, picked, strict=True)]
        for head in range(K):
            gone = sorted(set(range(end)) - set(there[head]))
            visible[head][end:, gone] = False
        found.append([list(one) for one in there])
    return found


def _heads(layer, config, x, rope) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q `[S, H, D]`, scaled, k and v `[K, S, D]`."""
    attention = config.attention
    H, K, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
    heads = (x @ array(layer.attention.qkv.weight).T).reshape(len(x), H + 2 * K, D)
    q = np.stack([rotated(heads[:, h], rope) for h in range(H)], axis=1) * attention.scale
    k = np.stack([rotated(heads[:, H + h], rope) for h in range(K)])
    return q, k, heads[:, H + K :].swapaxes(0, 1)


def _attend(q, k, v, visible) -> np.ndarray:
    (S, H, D), K = q.shape, len(k)
    out = np.zeros((S, H, D))
    for h in range(H):
        own = h // (H // K)
        logits = np.where(visible[own], q[:, h] @ k[own].T, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[:, h] = weights / weights.sum(axis=-1, keepdims=True) @ v[own]
    return out.reshape(S, H * D)
