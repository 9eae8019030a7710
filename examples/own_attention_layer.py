"""An attention layer of your own over the functional cache, in a jitted decode loop.

The layer projects to q, k and v; `update_and_attend` writes k and v into the pages and attends over
them. The cache is a pytree: it goes into the jitted step, which updates it in place, and comes out.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import CacheSpec, LayerSpec, init_cache, update_and_attend
from jaxkv.attention import AttentionBackend, StepInputs
from jaxkv.cache import choose_formats

H, K, D, E, P = 4, 2, 16, 32, 8  # query heads, KV heads, head dim, model width, tokens per page
layers = (LayerSpec(kv_heads=K, head_dim=D),)
formats = choose_formats("f32", layers)
spec = CacheSpec(layers=layers, page_size=P, num_pages=(6,), formats=formats)
to_qkv = jax.random.normal(jax.random.key(0), (E, (H + 2 * K) * D)) * E**-0.5
inputs = jax.random.normal(jax.random.key(1), (20, E))  # one hidden state per token


def project(x):
    """q `[T, H, D]`, k and v `[T, K, D]`."""
    return jnp.split((x @ to_qkv).reshape(-1, H + 2 * K, D), [H, H + K], axis=1)


@functools.partial(jax.jit, donate_argnums=0)
def step(cache, x, length):
    """Computes the tokens `x [T, E]`, the last of a sequence of `length` tokens."""
    table = jnp.array([[5, 2, 4]], jnp.int32)  # its pages, in this order
    inputs = StepInputs.of(
        jnp.zeros(len(x), jnp.int32), length[None], jnp.array([0, len(x)], jnp.int32), table
    )
    q, k, v = project(x)
    options = dict(scale=D**-0.5, backend=AttentionBackend())
    return update_and_attend(cache, 0, (q, k, v), inputs, **options)


cache = init_cache(spec)
out, cache = step(cache, inputs[:12], jnp.array(12))  # the prompt
outputs = [*out]
for n in range(12, 20):  # then one token per step
    out, cache = step(cache, inputs[n : n + 1], jnp.array(n + 1))
    outputs.append(out[0])

q, k, v = (x[None] for x in project(inputs))
expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)[0]
difference = np.abs(np.array(outputs) - np.array(expected)).max()
print(f"{len(outputs)} tokens; largest difference from attention without a cache: {difference:.1e}")
assert difference < 1e-5
