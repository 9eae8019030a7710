"""A decoder in plain numpy and float64, without a cache: the reference of the Flax decoder.

It reads the same parameters and shares no code: it computes whole sequences, head by head.
"""

import numpy as np
from flax import nnx

from jaxkv.models.config import LinearScaling, ModelConfig, RopeConfig
from jaxkv.models.decoder import Decoder


def decode_naively(decoder: Decoder, tokens: list[int]) -> np.ndarray:
    """Returns the logits `[S, V]` float64 after each token of a sequence."""
    config = decoder.config
    x = config.embedding_scale * array(decoder.embedding)[tokens]
    for layer, own in zip(decoder.layers, config.layers, strict=True):
        attended = attend(layer, config, norm(x, layer.attention_norm), own.rope, own.window)
        x = x + norm(attended, layer.attention_post_norm)
        x = x + norm(mlp(layer, config, norm(x, layer.mlp_norm)), layer.mlp_post_norm)
    head = decoder.embedding if decoder.head is None else decoder.head
    return capped(norm(x, decoder.final_norm) @ array(head).T, config.logit_soft_cap)


def array(param: nnx.Param) -> np.ndarray:
    return np.asarray(param.get_value(), np.float64)


def norm(x: np.ndarray, module: nnx.Module | None) -> np.ndarray:
    if module is None:
        return x
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + module.epsilon) * array(module.weight)


def capped(logits: np.ndarray, cap: float | None) -> np.ndarray:
    return logits if cap is None else cap * np.tanh(logits / cap)


def mlp(layer: nnx.Module, config: ModelConfig, x: np.ndarray) -> np.ndarray:
    gate_up = array(layer.mlp.gate_up.weight)
    gate, up = x @ gate_up[: config.mlp_width].T, x @ gate_up[config.mlp_width :].T
    if config.activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    else:
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return (gate * up) @ array(layer.mlp.down.weight).T


def attend(
    layer: nnx.Module, config: ModelConfig, x: np.ndarray, rope: RopeConfig, window: int | None
) -> np.ndarray:
    attention = config.attention
    H, K, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
    qkv = x @ array(layer.attention.qkv.weight).T
    if attention.qkv_bias:
        qkv = qkv + array(layer.attention.qkv.bias)
    heads = qkv.reshape(len(x), H + 2 * K, D)
    behind = np.arange(len(x))[:, None] - np.arange(len(x))[None]  # query minus key
    hidden = (behind < 0) | (behind >= (window or len(x)))
    out = np.zeros((len(x), H, D))
    for h in range(H):
        k_head = H + h // (H // K)
        q, k, v = heads[:, h], heads[:, k_head], heads[:, k_head + K]
        q = rotated(norm(q, layer.attention.q_norm), rope)
        k = rotated(norm(k, layer.attention.k_norm), rope)
        logits = capped(q @ k.T * attention.scale, attention.soft_cap)
        weights = np.where(hidden, 0.0, np.exp(logits - logits.max(axis=-1, keepdims=True)))
        out[:, h] = weights / weights.sum(axis=-1, keepdims=True) @ v
    return out.reshape(len(x), H * D) @ array(layer.attention.out.weight).T


def rotated(x: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Rotates pairs (i, i + D/2) of `[S, D]` as complex numbers."""
    half = x.shape[1] // 2
    position = np.arange(len(x)) / (
        rope.scaling.factor if isinstance(rope.scaling, LinearScaling) else 1.0
    )
    turn = np.exp(1j * position[:, None] * rope.theta ** (-np.arange(half) / half))
    z = (x[:, :half] + 1j * x[:, half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)
