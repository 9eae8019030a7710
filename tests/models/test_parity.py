"""The decoder against Hugging Face transformers, float32, through the paged cache.

The references are described in `tests/data/README.md`: models of random weights, one per family,
with all their logits, and two real models with log-probabilities and greedy continuations.
"""

from collections.abc import Mapping
from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.attention import AttentionBackend, StepInputs
from jaxkv.cache import CacheSpec, choose_formats, init_cache
from jaxkv.engine import Completion, Engine, EngineConfig, Request
from jaxkv.models.decode_model import FlaxDecodeModel
from jaxkv.models.loading import load_model

TINY = (
    "gemma2_softcap",
    "gemma3_local_global",
    "llama3_rope",
    "mistral_window",
    "qwen2_bias",
    "qwen3_qknorm",
)
PAGE_SIZES = (8, 16, 64)
CONTINUATION = 64


def paged_logits(
    model: FlaxDecodeModel, ids: list[np.ndarray], page_size: int, budget: int
) -> list[np.ndarray]:
    """Logits `[n, V]` of each prompt: one batch over permuted pages, `budget` tokens a step."""
    lengths = [len(row) for row in ids]
    per_row = -(-max(lengths) // page_size)
    num_pages = len(ids) * per_row
    shuffled = 1 + np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    formats = choose_formats("f32", model.layers)
    spec = CacheSpec.plan(
        model.layers, formats, page_size=page_size, num_tokens=num_pages * page_size
    )
    tables = (jnp.asarray(shuffled.reshape(len(ids), per_row)),) * len(spec.groups)

    @jax.jit
    def step(params, cache, inputs):
        hidden, cache = model.forward(params, cache, inputs, AttentionBackend())
        return model.logits(params, hidden), cache

    cache, done = init_cache(spec), np.zeros(len(ids), int)
    found: list[list[np.ndarray]] = [[] for _ in ids]
    while done.sum() < sum(lengths):
        ends = np.minimum(np.cumsum(lengths - done), budget)  # first come, first served
        counts = np.diff(ends, prepend=0)
        chunks = [row[i : i + n] for row, i, n in zip(ids, done, counts, strict=True)]
        done = done + counts
        tokens = np.concatenate(chunks)
        inputs = StepInputs.of(
            jnp.asarray(np.pad(tokens, (0, budget - len(tokens)))),
            jnp.asarray(np.where(counts > 0, done, 0), jnp.int32),
            jnp.asarray([0, *ends], jnp.int32),
            *tables,
        )
        logits, cache = step(model.params, cache, inputs)
        for rows, new in zip(found, np.split(np.asarray(logits), ends), strict=False):
            rows.append(new)
    return [np.concatenate(rows) for rows in found]


SIZES = [(page_size, budget) for page_size in PAGE_SIZES for budget in (64, 256)]


@pytest.mark.parametrize(
    ("family", "page_size", "budget"),
    [
        pytest.param(
            *(family, page_size, budget),
            id=f"{family}-{page_size}-{'chunked' if budget == 64 else 'unchunked'}",
            # Each family at one of the sizes, and each of the sizes with one family.
            marks=() if SIZES[i] == (page_size, budget) else pytest.mark.slow,
        )
        for i, family in enumerate(TINY)
        for page_size, budget in SIZES
    ],
)
def test_every_logit_of_every_family_is_that_of_transformers(data, family, page_size, budget):
    folder = data / "tiny" / family
    with np.load(folder / "reference.npz") as stored:
        names = sorted({key.partition("/")[0] for key in stored.files})
        cases = [(stored[f"{name}/ids"], stored[f"{name}/logits"]) for name in names]
    model = load_model(str(folder)).model
    found = paged_logits(model, [ids for ids, _ in cases], page_size, budget)
    for (_, expected), logits in zip(cases, found, strict=True):
        chex.assert_trees_all_close(logits, expected, rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def load_real(request, data):
    """Loads a real model by name, with its reference: arrays by `NAME/key`."""
    fixtures = {"smollm2": "smollm2_path", "gemma3": "gemma3_path"}

    @cache
    def load(name: str) -> tuple[FlaxDecodeModel, dict[str, np.ndarray]]:
        with np.load(data / f"{name}.npz") as stored:
            reference = dict(stored)
        return load_model(str(request.getfixturevalue(fixtures[name]))).model, reference

    return load


def continued(
    model: FlaxDecodeModel, prompts: Mapping[str, np.ndarray], config: EngineConfig
) -> dict[str, Completion]:
    """At least CONTINUATION greedy tokens after each prompt, all served together."""
    engine = Engine(model, config)
    # More tokens than are compared, so that no prompt is done before the last one has its own:
    # the batch stays whole, and one decode step is compiled.
    completions = {
        name: engine.submit(
            Request(
                prompt=tuple(ids.tolist()),
                max_new_tokens=3 * CONTINUATION,
                prompt_logprobs=True,
                keep_logits=True,
            )
        )
        for name, ids in prompts.items()
    }
    while min(len(completion.tokens) for completion in completions.values()) < CONTINUATION:
        for delta in engine.step():
            del delta.completion.logits[1:]
    for completion in completions.values():
        engine.abort(completion.request_id)
    return completions


SOME = ("chat_1turn", "english_600")  # enough to cross a window, and soon done
REAL = [
    *(pytest.param(name, 16, 64, SOME, id=f"{name}-some") for name in ("smollm2", "gemma3")),
    *(
        pytest.param(
            *(name, page_size, budget, None),
            id=f"{name}-{page_size}-{'chunked' if budget == 64 else 'unchunked'}",
            marks=pytest.mark.slow,
        )
        for name in ("smollm2", "gemma3")
        for page_size in PAGE_SIZES
        for budget in (64, 2048)
    ),
]


@pytest.mark.parametrize(("name", "page_size", "budget", "cases"), REAL)
def test_a_real_model_scores_and_continues_as_in_transformers(
    load_real, name, page_size, budget, cases
):
    model, reference = load_real(name)
    cases = cases or sorted({key.partition("/")[0] for key in reference})
    prompts = {case: reference[f"{case}/ids"] for case in cases}
    config = EngineConfig(
        max_sequences=len(prompts),
        token_budget=budget,
        page_size=page_size,
        pool_tokens=sum(len(ids) + 4 * CONTINUATION for ids in prompts.values()),
    )
    for case, completion in continued(model, prompts, config).items():
        found = completion.prompt_logprobs
        assert found is not None and np.isnan(found[0])
        expected = reference[f"{case}/prompt_logprobs"]
        chex.assert_trees_all_close(found[1:], expected[1:], rtol=0, atol=1e-3, custom_message=case)
        logits, kept = completion.logits[0], reference[f"{case}/logit_ids"]
        chex.assert_trees_all_close(
            logits[kept], reference[f"{case}/logits_last"], rtol=0, atol=3e-3, custom_message=case
        )
        # Logits that are not stored one by one are in their sum.
        total, want = (
            np.logaddexp.reduce(logits, dtype=np.float64),
            reference[f"{case}/logits_last_lse"],
        )
        chex.assert_trees_all_close(total, want, rtol=0, atol=3e-3, custom_message=case)
        tokens = np.array(completion.tokens[:CONTINUATION])
        differs = tokens != reference[f"{case}/cont_ids"]
        if differs.any():  # from there on the two texts have nothing to do with each other
            assert reference[f"{case}/cont_margin"][differs.argmax()] < 1e-3, case
