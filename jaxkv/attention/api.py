"""The public calls: write a step's K and V into a layer's pages, and attend over them."""

import jax

from jaxkv.attention.exact_tokens import ExactTokensLayer
from jaxkv.attention.layer import (
    PLATFORM_BACKEND,
    AttentionBackend,
    LayerAttention,
    PlainLayer,
    Queries,
    QueryAt,
)
from jaxkv.attention.sink_tokens import SinkTokensLayer
from jaxkv.attention.split_heads import SplitHeadsLayer
from jaxkv.attention.step import StepInputs
from jaxkv.attention.stored import PaddedLayer, RotatedLayer
from jaxkv.cache import CacheSpec, KVCache
from pallas_kernels.attention.options import AttentionOptions


def update_and_attend(
    cache: KVCache,
    layer: int,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    step: StepInputs,
    *,
    scale: float,
    soft_cap: float | None = None,
    query_at: QueryAt | None = None,
    backend: AttentionBackend = PLATFORM_BACKEND,
) -> tuple[jax.Array, KVCache]:
    """Writes a step's K and V into a layer's pages, then attends over them.

    Format, window and sink tokens are those of the layer in `cache.spec`.

    Example: one layer of a decoder in a jitted step. `project`, `rotate` and `merge` are the
    model's own.

        @partial(jax.jit, donate_argnames="cache")
        def attention_layer(params, x, cache, step):
            _, position = step.places()
            q, k, v = project(params, x)  # [T, H, D], [T, K, D], [T, K, D]
            qkv = rotate(q, position), rotate(k, position), v
            out, cache = update_and_attend(cache, 0, qkv, step, scale=q.shape[-1] ** -0.5)
            return merge(params, out), cache

    Args:
      cache: the cache. Where the caller's jit donates it, it is updated in place.
      layer: index of the layer.
      qkv: `[T, H, D]`, `[T, K, D]`, `[T, K, D]`, q and k rotated to their positions.
      step: the inputs of the step.
      scale: factor on q.k.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; None leaves them.
      query_at: returns q rotated to other positions `[T]` int32; only layers with sink tokens call
        it (`LayerSpec.sink_tokens`).
      backend: how attention is run.

    Returns:
      `[T, H, D]` in q's dtype, zero in padding rows, and the new cache.

    Raises:
      ValueError: there is no such layer, or a shape or dtype does not fit the cache; the message
        names the dimension.
    """
    q, k, v = qkv
    cache = _layer_attention(cache.spec, layer, q.shape[2]).write(cache, k, v, step)
    out = attend(
        cache,
        layer,
        q,
        step,
        scale=scale,
        soft_cap=soft_cap,
        query_at=query_at,
        backend=backend,
    )
    return out, cache


def attend(
    cache: KVCache,
    layer: int,
    q: jax.Array,
    step: StepInputs,
    *,
    scale: float,
    soft_cap: float | None = None,
    query_at: QueryAt | None = None,
    backend: AttentionBackend = PLATFORM_BACKEND,
) -> jax.Array:
    """Attends over pages that have the step's K and V already; see `update_and_attend`."""
    options = AttentionOptions(
        scale=scale,
        window=cache.spec.layers[layer].window,
        soft_cap=soft_cap,
        query_tile=backend.query_tile,
    )
    queries = Queries(q=q, at=query_at, step=step, options=options, backend=backend.name)
    return _layer_attention(cache.spec, layer, q.shape[2]).read(cache, queries)


def _layer_attention(spec: CacheSpec, layer: int, head_dim: int) -> LayerAttention:
    """How a layer of a cache writes and attends, for a model's `head_dim`."""
    if not 0 <= layer < len(spec.layers):
        raise ValueError(f"layer must be 0 to {len(spec.layers) - 1}, got {layer}")
    own, pages, exact = spec.layers[layer], spec.pages[layer], spec.exact_pages(layer)
    if len(pages.groups) > 1:
        attention = SplitHeadsLayer(layer)
    elif own.sink_tokens:
        assert own.window is not None
        attention = SinkTokensLayer(layer, own.window, own.sink_tokens)
    elif exact is not None:
        assert pages.format.exact is not None
        attention = ExactTokensLayer(layer, exact, pages.format.exact)
    else:
        attention = PlainLayer(layer)
    if pages.head_dim != head_dim:
        attention = PaddedLayer(attention, pages.head_dim)
    return RotatedLayer(attention) if pages.format.rotates else attention
