"""Windows with first tokens, compared with a float64 decoder that masks and rotates, and with
themselves under chunks, pages, preemption and cached prefixes."""

from dataclasses import replace

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.attention.sink_tokens import SinkTokensLayer
from jaxkv.cache import CacheSpec, LayerSpec, choose_formats, init_cache
from jaxkv.compress import Compression
from jaxkv.engine import Engine, EngineConfig, Request
from jaxkv.models.decoder import Decoder
from tests.engine.disturbances import logit_bits, preempt_at
from tests.engine.tiny import CheckedEngine, Tiny, random_prompts, run
from tests.models.numpy_decoder import array, mlp, norm, rotated

(PROMPT,) = random_prompts(100)
SINKS = {"streaming_llm": 4, "sliding_window": 0}


def compression(method: str, tokens: int) -> Compression:
    return Compression(method=method, budget=tokens)


def engine_of(tiny: Tiny, method: str, tokens: int = 24, **options) -> CheckedEngine:
    options = dict(page_size=8) | options
    return tiny.engine(compression=compression(method, tokens), **options)


def decode_windowed(decoder: Decoder, tokens: list[int], window: int, sinks: int) -> np.ndarray:
    """Logits `[S, V]`, when full layers see a window and some first tokens. Those are seen from
    where the query would stand if nothing were between them and the window."""
    config = decoder.config
    attention = config.attention
    H, K, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
    x = array(decoder.embedding)[tokens]
    n = len(x)
    for layer, own in zip(decoder.layers, config.layers, strict=True):
        h = norm(x, layer.attention_norm) @ array(layer.attention.qkv.weight).T
        heads = h.reshape(n, H + 2 * K, D)
        out = np.zeros((n, H, D))
        width, first = (own.window, 0) if own.window else (window, sinks)
        for head in range(H):
            k_head = H + head // (H // K)
            q, k, v = heads[:, head], rotated(heads[:, k_head], own.rope), heads[:, k_head + K]
            for i in range(n):
                near = [j for j in range(max(0, i - width + 1), i + 1) if j >= first]
                far = [j for j in range(first) if j <= i]
                logits = []
                for at, keys in ((i, near), (min(i, first + width - 1), far)):
                    query = np.zeros((at + 1, D))
                    query[at] = q[i]
                    logits += list(k[keys] @ rotated(query, own.rope)[at])
                e = np.exp(np.array(logits) * attention.scale)
                out[i, head] = e / e.sum() @ v[near + far]
        x = x + out.reshape(n, -1) @ array(layer.attention.out.weight).T
        x = x + mlp(layer, config, norm(x, layer.mlp_norm))
    return norm(x, decoder.final_norm) @ array(decoder.head).T


@pytest.mark.parametrize(
    "method", ["streaming_llm", pytest.param("sliding_window", marks=pytest.mark.slow)]
)
def test_an_engine_sees_only_the_window_and_the_first_tokens(mixed: Tiny, method):
    request = Request(prompt=PROMPT, max_new_tokens=5, keep_logits=True)
    completion = run(engine_of(mixed, method, token_budget=37), request)
    sinks = SINKS[method]
    tokens = [*PROMPT, *completion.tokens]
    want = decode_windowed(mixed.decoder, tokens, 24 - sinks, sinks)[99:-1]
    chex.assert_trees_all_close(np.stack(completion.logits), want, rtol=1e-7, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["f32", "int8", "int4"])
def test_chunks_pages_preemption_and_hits_change_no_bit(mixed: Tiny, kv_format):
    def bits(engine, disturb=None):
        completion = engine.submit(Request(prompt=PROMPT, max_new_tokens=9, keep_logits=True))
        number = 0
        while engine.has_work:
            if disturb is not None:
                disturb(engine, number)
            engine.step()
            number += 1
        return logit_bits([completion])[0]

    fixed = dict(kv_format=kv_format, deterministic=True)
    want = bits(engine_of(mixed, "streaming_llm", **fixed))
    others = engine_of(mixed, "streaming_llm", token_budget=17, **fixed)
    larger = engine_of(mixed, "streaming_llm", page_size=32, **fixed)
    for engine in (others, larger):
        for disturb in (None, preempt_at(3), None):
            chex.assert_trees_all_equal(bits(engine, disturb), want)
        assert engine.metrics.cached_tokens > 0


@pytest.mark.slow
def test_a_stream_holds_as_many_pages_at_its_end_as_at_its_beginning(mixed: Tiny):
    """The stream is longer than the positions of the model."""
    longest = 3 * mixed.model.max_positions
    engine = Engine(
        mixed.model,
        EngineConfig(
            max_sequences=1,
            token_budget=64,
            page_size=8,
            max_length=longest,
            compression=compression("streaming_llm", 24),
        ),
    )
    assert engine.max_length == longest
    large = EngineConfig(max_length=longest, compression=compression("streaming_llm", 24))
    assert Engine(mixed.model, large).max_length == longest  # with chunks of 512 tokens, too
    (prompt,) = random_prompts(longest - 40)
    engine.submit(Request(prompt=prompt, max_new_tokens=40))
    held = []
    while engine.has_work:
        engine.step()
        held.append(engine.kv_bytes_held)
    chunks = -(-len(prompt) // 64)
    assert max(held[2 : chunks // 2]) == max(held[chunks // 2 : chunks])
    assert max(held[chunks : chunks + 16]) == max(held[-17:-1])
    per_page = sum(map(engine.spec.bytes_per_page, range(len(engine.pools))))
    assert max(held[chunks:-1]) <= (1 + -(-20 // 8) + 1) * per_page


@pytest.mark.parametrize(
    "window, sinks, name, message",
    [
        (None, 4, "f32", "sinks are at most 8 and stand before a window"),
        (16, 9, "f32", "sinks are at most 8 and stand before a window"),
        (16, 4, "kivi4", "format kivi4 does not go with sink tokens"),
    ],
)
def test_layers_that_cannot_be_are_refused(window, sinks, name, message):
    layers = (LayerSpec(kv_heads=1, head_dim=8, window=window, sink_tokens=sinks),)
    formats = choose_formats(name, layers)
    spec = CacheSpec(layers=layers, page_size=8, num_pages=(3,), formats=formats)
    spec = replace(spec, num_pages=(3,) * len(spec.groups))
    with pytest.raises(ValueError, match=message):
        init_cache(spec)


def test_queries_see_the_first_tokens_from_the_end_of_the_cache():
    layer = SinkTokensLayer(index=1, window=12, sink_tokens=4)
    at = layer.sink_position(jnp.array([0, 14, 15, 16, 100_000], jnp.int32))
    assert at.tolist() == [0, 14, 15, 15, 15]
