"""Fewer KV heads: pools a decoder's K and V projections, so that its cache is smaller.

Afterwards the query heads of a group share one KV head; the number of query heads stays. RoPE
rotates all heads at a position by the same angles, so it commutes with their mean. Source: Ainslie
et al., arXiv 2305.13245, section 2.1. `jaxkv.models.training` trains a decoder with pooled heads.

    mean      the mean of the group's heads
    first     the group's first head
    random    new random weights of the same size
    aligned   the mean, after each head was rotated towards it. K and its queries are rotated by an
              angle in each plane of RoPE, V and its part of the output by an orthogonal matrix.
              This does not change what the model computes (arXiv 2412.20677 does it for V)
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

from jaxkv.models.decode_model import FlaxDecodeModel, ParamPath
from jaxkv.models.errors import ModelError
from jaxkv.models.weights import abstract_model

Pooling = Literal["mean", "first", "random", "aligned"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
ROUNDS = 8  # how often heads are turned towards their mean, which changes each time


def with_kv_heads(
    model: FlaxDecodeModel, num_kv_heads: int, pooling: Pooling = "mean", *, seed: int = 0
) -> FlaxDecodeModel:
    """Returns a decoder with fewer KV heads, or the model itself if the number is the same.

    Args:
      model: the decoder; it is not changed.
      num_kv_heads: the new number of KV heads, a divisor of the model's.
      pooling: how the heads of a group become one.
      seed: seed for the pooling `random`.

    Raises:
      ModelError: the number does not divide the model's, or `pooling` is `aligned` and the model
        has a norm on its keys.
    """
    attention = model.config.attention
    K = attention.num_kv_heads
    if num_kv_heads < 1 or K % num_kv_heads:
        raise ModelError(f"{num_kv_heads} KV heads do not divide the model's {K}")
    if pooling == "aligned" and attention.qk_norm:
        raise ModelError("aligned heads need keys that are not normed, as this model's are")
    if num_kv_heads == K:
        return model
    config = replace(model.config, attention=replace(attention, num_kv_heads=num_kv_heads))
    graphdef, shapes = abstract_model(config, model.named_params[("embedding",)].dtype)
    named = model.named_params
    rng = np.random.default_rng(seed)
    for i in range(len(config.layers)):
        path: ParamPath = ("layers", i, "attention")
        heads = _Heads.of(named, path, model)
        if pooling == "aligned":
            heads.align(num_kv_heads)
        heads.pool(num_kv_heads, pooling, rng)
        named |= {
            where: jnp.asarray(value, named[where].dtype)
            for where, value in heads.parameters(path).items()
        }
    return FlaxDecodeModel.from_named(config, graphdef, {path: named[path] for path in shapes})


@dataclass
class _Heads:
    """The projections of one layer, by head. The last column of q, k and v is the bias.

    Attributes:
      q: `[H, D, E + 1]`, the query heads.
      k, v: `[K, D, E + 1]`, the KV heads.
      out: `[H, D, E]`, the transposed projection from each head's output to the stream.
      has_bias: whether the model has a bias; if not, the last column is 0.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    has_bias: bool

    @classmethod
    def of(cls, named: dict, path: ParamPath, model: FlaxDecodeModel) -> "_Heads":
        attention = model.config.attention
        H, K, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
        weight = np.asarray(named[(*path, "qkv", "weight")], np.float32)
        bias = named.get((*path, "qkv", "bias"))
        column = np.zeros(len(weight)) if bias is None else np.asarray(bias, np.float32)
        joined = np.concatenate([weight, column[:, None]], axis=1).reshape(H + 2 * K, D, -1)
        out = np.asarray(named[(*path, "out", "weight")], np.float32)
        q, k, v = np.split(joined, (H, H + K))
        return cls(q, k, v, out.T.reshape(H, D, -1).copy(), bias is not None)

    def parameters(self, path: ParamPath) -> dict[ParamPath, np.ndarray]:
        """Returns the layer's parameters by their paths."""
        joined = np.concatenate([self.q, self.k, self.v])
        joined = joined.reshape(-1, joined.shape[2])
        found = {
            (*path, "qkv", "weight"): joined[:, :-1],
            (*path, "out", "weight"): self.out.reshape(-1, self.out.shape[2]).T,
        }
        return found | ({(*path, "qkv", "bias"): joined[:, -1]} if self.has_bias else {})

    def pool(self, num_kv_heads: int, pooling: Pooling, rng: np.random.Generator) -> None:
        """Makes one head of each group."""
        for name in ("k", "v"):
            heads = getattr(self, name)
            groups = heads.reshape(num_kv_heads, -1, *heads.shape[1:])
            pooled = groups[:, 0] if pooling == "first" else groups.mean(axis=1)
            if pooling == "random":
                pooled = rng.standard_normal(pooled.shape) * heads.std()
                pooled[..., -1] = 0.0
            setattr(self, name, pooled)

    def align(self, num_kv_heads: int) -> None:
        """Turns the heads of each group towards their mean; the layer's result stays the same."""
        K = len(self.k)
        queries = self.q.reshape(K, -1, *self.q.shape[1:])  # by KV head; both are views
        outs = self.out.reshape(K, -1, *self.out.shape[1:])
        for heads in np.split(np.arange(K), num_kv_heads):
            for _ in range(ROUNDS):
                k_mean, v_mean = _planes(self.k[heads].mean(axis=0)), self.v[heads].mean(axis=0)
                for head in heads:
                    own = _planes(self.k[head])
                    overlap = (k_mean * own.conj()).sum(axis=-1)
                    turn = np.exp(1j * np.angle(overlap))[:, None]
                    self.k[head] = _channels(turn * own)
                    queries[head] = [_channels(turn * _planes(q)) for q in queries[head]]
                    left, _, right = np.linalg.svd(v_mean @ self.v[head].T)
                    self.v[head] = left @ right @ self.v[head]
                    outs[head] = left @ right @ outs[head]


def _planes(x: np.ndarray) -> np.ndarray:
    """Returns channels `[D, E]` as complex numbers `[D / 2, E]`: RoPE pairs i with i + D / 2."""
    first, second = np.split(x, 2)
    return first + 1j * second


def _channels(z: np.ndarray) -> np.ndarray:
    return np.concatenate([np.real(z), np.imag(z)])
