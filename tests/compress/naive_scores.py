"""Reference scores of every method: plain NumPy in float64, one token and head at a time.

The vectorised scores are compared with these; no code is shared. `q` is `[n, H, D]` with the
softmax's scale applied, `k` and `v` are `[K, S, D]`; query t is token t of the sequence.
"""

import math

import numpy as np

INF = math.inf


def weights_of(q: np.ndarray, k: np.ndarray, cap: float | None) -> np.ndarray:
    """`[n, H, S]`: causal attention."""
    n, H, _ = q.shape
    K, S, _ = k.shape
    weights = np.zeros((n, H, S))
    for t in range(n):
        for h in range(H):
            logits = k[h // (H // K), : t + 1] @ q[t, h]
            if cap is not None:
                logits = cap * np.tanh(logits / cap)
            e = np.exp(logits - logits.max())
            weights[t, h, : t + 1] = e / e.sum()
    return weights


def knorm(k, **_):
    return -np.linalg.norm(k, axis=-1)


def keydiff(k, **_):
    scores = np.zeros(k.shape[:2])
    for head, keys in enumerate(k):
        anchor = np.mean([key / np.linalg.norm(key) for key in keys], axis=0)
        for j, key in enumerate(keys):
            scores[head, j] = -key @ anchor / np.linalg.norm(key) / np.linalg.norm(anchor)
    return scores


def tova(q, k, cap, **_):
    mean = weights_of(q, k, cap)[-1].mean(axis=0)
    mean[-1] = INF
    return np.stack([mean] * len(k))


def snapkv(q, k, cap, window=64, kernel_size=5, **_):
    (n, H, _), (K, S, _) = q.shape, k.shape
    weights = weights_of(q, k, cap)[n - min(n, window) :]
    scores = np.full((K, S), INF)
    half = kernel_size // 2
    for head in range(K):
        for j in range(S - window):
            near = [i for i in range(j - half, j + half + 1) if 0 <= i < S - window]
            own = range(head * (H // K), (head + 1) * (H // K))
            total = sum(weights[t, h, i] for t in range(window) for h in own for i in near)
            scores[head, j] = total / window / kernel_size / len(own)
    return scores


def h2o(q, k, cap, keep, recent_part=0.5, **_):
    (_, H, _), (K, S, _) = q.shape, k.shape
    total = weights_of(q, k, cap).sum(axis=0).reshape(K, H // K, S).mean(axis=1)
    total[:, S - int(keep * recent_part) :] = INF
    return total


def expected_attention(q, k, v, turned, sink_tokens=4, future_positions=512, **_):
    """`turned(x, by)` rotates a vector on by some positions."""
    (n, H, D), (K, S, _) = q.shape, k.shape
    weights = np.zeros((H, S))
    future = range(n, n + future_positions)
    average = np.mean([[turned(unit, i) for unit in np.eye(D)] for i in future], axis=0).T
    first = sink_tokens
    for h in range(H):
        plain = np.array([turned(q[t, h], -t) for t in range(first, n)])
        mean, covariance = plain.mean(axis=0), np.cov(plain.T, bias=True)
        mean, covariance = average @ mean, average @ covariance @ average.T
        keys = k[h // (H // K), first:]
        z = np.array([mean @ key + key @ covariance @ key / 2 for key in keys])
        e = np.exp(z - z.max())
        weights[h, first:] = e / e.sum()
    scores = weights.reshape(K, H // K, S).mean(axis=1) * np.linalg.norm(v, axis=-1)
    scores[:, :first] = INF
    return scores


SCORES = {f.__name__: f for f in (knorm, keydiff, tova, snapkv, h2o, expected_attention)} | {
    "pyramidkv": snapkv
}


def best(scores: np.ndarray, keep: int) -> list[list[int]]:
    """Returns, ascending, each head's tokens with the highest scores; the last of equal scores."""
    chosen = []
    for row in scores:
        order = sorted(range(len(row)), key=lambda j: (row[j], j))
        chosen.append(sorted(order[len(row) - keep :]))
    return chosen


def best_of_layer(scores: np.ndarray, keep: int, safeguard: float = 0.2) -> list[list[int]]:
    """AdaKV: the highest scores of all heads together, after the safeguard of each head."""
    K, S = scores.shape
    chosen = {(head, j) for head, js in enumerate(best(scores, int(keep * safeguard))) for j in js}
    order = sorted(np.ndindex(K, S), key=lambda at: (scores[at], at), reverse=True)
    for at in order:
        if len(chosen) < K * keep:
            chosen.add(at)
    return [sorted(j for head, j in chosen if head == own) for own in range(K)]
