"""What a harness asks for, against log-probabilities of a full recompute and greedy answers."""

import importlib.util
import json

import chex
import numpy as np
import pytest

from jaxkv.cli import console, harness
from jaxkv.compress import Compression
from jaxkv.engine import Engine, Request, RequestError
from jaxkv.eval import HarnessModel
from jaxkv.models.loading import load_model
from tests.engine.tiny import BytesDetokenizer, CheckedEngine, Tiny, V, run
from tests.models.tiny_checkpoint import write_gguf

PREFIX = 0
CONTEXT, GOOD, BAD = "a red cat sat on the mat and the mat was", " warm", " cold and wet"


class Letters:
    """One token per character, and one before every text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [PREFIX] * add_special_tokens + [1 + ord(c) % (V - 1) for c in text]


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny.random()


def model_of(tiny: Tiny, method: str | None = None, budget: str = "0.5", **options) -> HarnessModel:
    interval = options.pop("interval", None)
    chosen = method and Compression(method=method, budget=budget, interval=interval)
    engine = tiny.engine(
        detokenizer=BytesDetokenizer, page_size=8, compression=chosen or None, **options
    )
    return HarnessModel(engine, Letters(), prefix_id=PREFIX)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def naive(tiny: Tiny, given: list[int], scored: list[int]) -> tuple[float, bool]:
    table = log_softmax(tiny.logits([*given, *scored]))[len(given) - 1 : -1]
    chosen = table[np.arange(len(scored)), scored]
    return float(chosen.sum()), bool((table.argmax(axis=-1) == scored).all())


def test_continuations_have_the_log_probabilities_of_a_full_recompute(tiny: Tiny):
    model = model_of(tiny)
    encode = Letters().encode
    pairs = [(CONTEXT, GOOD), (CONTEXT, BAD), ("", BAD), (CONTEXT + " ", "x"), (CONTEXT, "")]
    done: list[int] = []
    found = model.loglikelihood(pairs, done.append)
    assert sum(done) == len(pairs)
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        given = encode(context.rstrip()) if context else [PREFIX]
        scored = encode(context + continuation)[len(given) :]
        want = naive(tiny, given, scored) if scored else (0.0, True)
        chex.assert_trees_all_close(total, want[0], rtol=1e-7, atol=1e-3)
        assert greedy == want[1]
    # The context was computed once: later ones find all of it but its last token.
    assert isinstance(model.engine, CheckedEngine)
    assert model.engine.metrics.cached_tokens >= 3 * (len(CONTEXT) - 1)


def test_the_likeliest_tokens_are_told_from_others(tiny: Tiny):
    prompt = tuple(Letters().encode(CONTEXT))
    answer = tiny.greedy(prompt, 4)
    engine = tiny.engine(page_size=8)
    for tokens, greedy in ((answer, True), ([*answer[:3], (answer[3] + 1) % V], False)):
        asked = dict(max_new_tokens=0, prompt_logprobs=True, prompt_logprobs_from=len(prompt))
        completion = run(engine, Request(prompt=(*prompt, *tokens), **asked))
        assert completion.prompt_logprobs is not None and completion.prompt_greedy is not None
        assert np.isnan(completion.prompt_logprobs[: len(prompt)]).all()
        assert completion.prompt_greedy[len(prompt) :].all() == greedy
    assert completion.cached_tokens == len(prompt) + 3 - 4  # of the first one's prompt


def test_texts_longer_than_the_engine_takes_are_scored_token_by_token_once(tiny: Tiny):
    model = model_of(tiny, max_length=24)
    tokens = [PREFIX, *Letters().encode(CONTEXT * 2, add_special_tokens=False)]
    n, L = len(tokens), 24
    ends = [min(n, L + i * (L - 1)) for i in range(-(-(n - L) // (L - 1)) + 1)]
    want, done = 0.0, 1
    for end in ends:
        start = max(0, end - L)
        want += naive(tiny, tokens[start:done], tokens[done:end])[0]
        done = end
    assert done == n
    (found,) = model.loglikelihood_rolling([CONTEXT * 2])
    chex.assert_trees_all_close(found, want, rtol=1e-7, atol=1e-3)
    cut = model.loglikelihood([(CONTEXT, GOOD)])[0][0]
    both = Letters().encode(CONTEXT + GOOD)[-L:]
    split = len(both) - len(GOOD)
    chex.assert_trees_all_close(
        cut, naive(tiny, both[:split], both[split:])[0], rtol=1e-7, atol=1e-3
    )
    with pytest.raises(RequestError, match="80 tokens to score; the engine takes 24"):
        model.loglikelihood([(CONTEXT, CONTEXT[:40] * 2)])


def test_answers_end_at_their_stops(tiny: Tiny):
    model = model_of(tiny)
    prompt = tuple(Letters().encode(CONTEXT))
    text = BytesDetokenizer.text(tiny.greedy(prompt, 12))
    stop = text[4:6]
    asked = [(CONTEXT, dict(until=[stop], max_gen_toks=12)), (CONTEXT, dict(max_gen_toks=12))]
    found = model.generate_until(asked)
    assert found[0] == text[: text.index(stop)] and found[1] == text
    drawn = model.generate_until([(CONTEXT, dict(do_sample=True, temperature=5.0, until="zz"))])
    assert drawn[0] != text[: len(drawn[0])]
    with pytest.raises(RequestError, match="unknown generation options: num_beams"):
        model.generate_until([(CONTEXT, dict(num_beams=3))])


@pytest.mark.slow
def test_a_context_loses_tokens_before_its_continuation_is_scored(tiny: Tiny):
    full, half = model_of(tiny), model_of(tiny, "knorm")
    pairs = [(CONTEXT, BAD), (CONTEXT, BAD + " too")]
    whole, shortened = full.loglikelihood(pairs), half.loglikelihood(pairs)
    n = len(CONTEXT) + 1
    prompt = tuple(Letters().encode(CONTEXT + BAD))
    engine = tiny.engine(page_size=8, compression=Compression(method="knorm", budget="0.5"))
    completion = run(
        engine, Request(prompt=prompt, max_new_tokens=0, prompt_logprobs=True, context=n)
    )
    assert completion.prompt_logprobs is not None and completion.dropped_tokens == n - n // 2
    chex.assert_trees_all_close(
        shortened[0][0], completion.prompt_logprobs[n:].sum(), rtol=1e-7, atol=1e-3
    )
    assert all(abs(a[0] - b[0]) > 1e-2 for a, b in zip(whole, shortened, strict=True))
    with pytest.raises(RequestError, match="a whole text has no context"):
        half.loglikelihood_rolling([CONTEXT])
    often = model_of(tiny, "knorm", "16", interval=8)
    (rolled,), (plain,) = (m.loglikelihood_rolling([CONTEXT]) for m in (often, full))
    assert abs(rolled - plain) > 1e-2
    window = model_of(tiny, "streaming_llm", "20")
    assert abs(window.loglikelihood_rolling([CONTEXT])[0] - plain) > 1e-3


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval, of the extra eval, is not here"
)
@pytest.mark.filterwarnings("ignore")  # of the harness and of what it imports
def test_the_harness_runs_tasks_of_every_kind(tmp_path, capsys):
    checkpoint = str(write_gguf(tmp_path / "model.gguf"))
    rows = [
        {"context": "the tea and the cat", "choices": [" in the hat", " and the tea"], "gold": i}
        for i in (0, 1, 1)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    head = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
    )
    tasks = {
        "tiny_choice": 'output_type: multiple_choice\ndoc_to_text: "{{context}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{gold}}"\n'
        "metric_list:\n  - metric: acc\n",
        "tiny_rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\n'
        'doc_to_target: "{{context}}"\nmetric_list:\n  - metric: word_perplexity\n'
        "  - metric: bits_per_byte\n",
        "tiny_answer": 'output_type: generate_until\ndoc_to_text: "{{context}}"\n'
        'doc_to_target: "{{choices[0]}}"\ngeneration_kwargs:\n  until: ["hat"]\n'
        "  max_gen_toks: 4\nmetric_list:\n  - metric: exact_match\n",
    }
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, body in tasks.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{head}{body}")
    out = tmp_path / "results.json"
    argv = ["--model", checkpoint, "--include-path", str(folder), "--page-size", "8"]
    argv += ["--batch", "2", "--out", str(out), "--tasks", *tasks]
    assert console.run(harness.main, argv) == 0
    results = json.loads(out.read_text())["results"]
    assert set(tasks) <= set(results) and "tiny_choice" in capsys.readouterr().out
    loaded = load_model(checkpoint)
    tokenizer = loaded.require_tokenizer()
    plain = HarnessModel(
        Engine(loaded.model), tokenizer, prefix_id=tokenizer.bos_id or 0, stop_ids=()
    )
    pairs = [(row["context"], choice) for row in rows for choice in row["choices"]]
    scores = np.array(plain.loglikelihood(pairs))[:, 0].reshape(3, 2)
    right = np.mean(scores.argmax(axis=1) == [row["gold"] for row in rows])
    chex.assert_trees_all_close(results["tiny_choice"]["acc,none"], right, rtol=1e-7)
    argv = ["--model", checkpoint, "--include-path", str(folder), "--kv-format", "int8"]
    argv += ["--method", "knorm", "--budget", "50%", "--tasks", "tiny_choice", "tiny_answer"]
    assert console.run(harness.main, argv) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "knorm"], "--method needs a --budget"),
        (["--include-path", "/no/such"], "is no directory"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(capsys, options, message):
    assert console.run(harness.main, ["--tasks", "none", *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
