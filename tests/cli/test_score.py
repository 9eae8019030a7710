"""`python scripts score`: what it writes is the model's, whatever the engine's sizes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from jaxkv.cli import console, score
from jaxkv.models.loading import LoadedModel, load_model
from tests.models.numpy_decoder import decode_naively
from tests.models.tiny_checkpoint import CONFIG, V, write_hf

IDS = {
    "one": [7],
    "short": [1, 2, 3],
    "page": list(range(8)),
    "long": [(7 * i) % V for i in range(70)],
}
KEYS = {
    "ids": np.int32,
    "prompt_logprobs": np.float32,
    "logits_last": np.float32,
    "cont_ids": np.int32,
    "cont_logprobs": np.float32,
    "cont_margin": np.float32,
}
NEW_TOKENS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    config = CONFIG | {"model_type": "mistral", "sliding_window": 20, "num_hidden_layers": 1}
    return write_hf(tmp_path_factory.mktemp("score") / "model", config=config)


@pytest.fixture(scope="module")
def loaded(folder) -> LoadedModel:
    return load_model(str(folder))


@pytest.fixture(scope="module", autouse=True)
def no_compilation_cache():
    # It is a setting of the whole process, and would stay on for other tests.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "enable_compilation_cache", lambda: None)
        yield


class Scoring:
    """Runs the command on a model; `code` is that of the last run."""

    def __init__(self, folder: Path, tmp_path: Path):
        self.folder, self.out = folder, tmp_path / "out.npz"
        self.cases = tmp_path / "cases.jsonl"

    def __call__(self, lines: Sequence[Any], *options: str) -> dict[str, np.ndarray]:
        """Scores lines, which are JSON values or, as bytes, lines as they are."""
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.cases.write_bytes(b"\n".join(raw))
        argv = ["--model", str(self.folder), "--in", str(self.cases), "--out", str(self.out)]
        argv += ["--new-tokens", str(NEW_TOKENS)]
        argv += ["--batch", "1", "--chunk", "64", *options]  # few shapes to compile
        self.code = console.run(score.main, argv)
        if not self.out.exists():
            return {}
        with np.load(self.out) as stored:
            return dict(stored)


@pytest.fixture
def run(folder, tmp_path) -> Scoring:
    return Scoring(folder, tmp_path)


def as_lines(cases: dict[str, list[int]]) -> list[dict[str, Any]]:
    return [{"name": name, "ids": ids} for name, ids in cases.items()]


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory) -> dict[str, np.ndarray]:
    """IDS, scored one at a time."""
    return Scoring(folder, tmp_path_factory.mktemp("plain"))(as_lines(IDS))


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        chex.assert_trees_all_close(found[key], value, rtol=1e-7, atol=1e-4, custom_message=key)


def test_every_array_is_that_of_a_decoder_without_cache(plain, loaded):
    assert plain.keys() == {f"{name}/{key}" for name in IDS for key in KEYS}
    decoder = loaded.model.decoder(loaded.model.params)
    for name, ids in IDS.items():
        found = {key: plain[f"{name}/{key}"] for key in KEYS}
        assert {key: value.dtype for key, value in found.items()} == KEYS
        tokens = [*ids, *found["cont_ids"].tolist()]
        logits = decode_naively(decoder, tokens)
        logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        chosen = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
        n = len(ids)
        assert found["ids"].tolist() == ids
        assert np.isnan(found["prompt_logprobs"][0])
        chex.assert_trees_all_close(
            found["prompt_logprobs"][1:], chosen[: n - 1], rtol=1e-7, atol=1e-4
        )
        chex.assert_trees_all_close(found["logits_last"], logits[n - 1], rtol=1e-7, atol=1e-4)
        assert found["cont_ids"].tolist() == logits[n - 1 : -1].argmax(axis=-1).tolist()
        chex.assert_trees_all_close(found["cont_logprobs"], chosen[n - 1 :], rtol=1e-7, atol=1e-4)
        best = np.sort(logits[n - 1 : -1], axis=-1)
        chex.assert_trees_all_close(
            found["cont_margin"], best[:, -1] - best[:, -2], rtol=1e-7, atol=1e-4
        )


@pytest.mark.parametrize(
    "options",
    [
        ("--page-size", "8", "--chunk", "16", "--batch", "3"),
        ("--backend", "reference", "--chunk", "512", "--page-size", "64"),
    ],
    ids=["small", "large"],
)
def test_sizes_and_backends_change_nothing(run, plain, capsys, options):
    assert_close(run(as_lines(IDS), *options), plain)
    assert run.code == 0
    assert capsys.readouterr() == (f"{run.out}: {len(IDS)} of {len(IDS)} cases\n", "")


def test_deterministic_logits_have_the_same_bits_whatever_the_sizes(run, plain):
    cases = as_lines(IDS)
    first = run(cases, "--deterministic")
    second = run(
        cases[::-1], "--deterministic", "--page-size", "8", "--chunk", "24", "--batch", "3"
    )
    assert_close(first, plain)
    for key, value in first.items():
        chex.assert_trees_all_equal(value, second[key], custom_message=key)


def test_a_text_is_scored_as_its_ids_and_no_stop_token_ends_a_continuation(run, loaded):
    tokenizer = loaded.require_tokenizer()
    (stop,) = tokenizer.stop_ids
    text = "the other the<|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[-1] == stop
    arrays = run([{"name": "text", "text": text}, {"name": "ids", "ids": ids}])
    assert arrays["text/ids"].tolist() == ids and len(arrays["text/cont_ids"]) == NEW_TOKENS
    for key in KEYS:
        chex.assert_trees_all_equal(arrays[f"text/{key}"], arrays[f"ids/{key}"])


def test_weights_may_be_bfloat16(run, plain):
    narrow = run(as_lines(IDS), "--dtype", "bf16")
    for name in IDS:
        key = f"{name}/logits_last"
        assert 0 < np.abs(plain[key] - narrow[key]).max() < 0.3


def test_a_continuation_ends_where_the_models_longest_sequence_does(run):
    longest = CONFIG["max_position_embeddings"]
    arrays = run(as_lines({"near": [1] * (longest - 2), "last": [1] * (longest - 1)}))
    assert run.code == 0
    assert [len(arrays[f"{name}/cont_ids"]) for name in ("near", "last")] == [2, 1]


def test_a_case_that_the_model_cannot_take_is_left_out_alone(run, plain, capsys):
    limit = CONFIG["max_position_embeddings"]
    bad = [
        {"name": "too long", "ids": [1] * limit},
        {"name": "empty", "ids": []},
        {"name": "no text", "text": ""},
        {"name": "unknown id", "ids": [1, V]},
        {"name": "negative", "ids": [-1]},
    ]
    mixed = run([bad[0], *as_lines(IDS), *bad[1:]])
    assert run.code == 2
    stderr = capsys.readouterr().err
    complaints = stderr.splitlines()
    assert len(complaints) == len(bad)
    for case in bad:
        assert sum(line.startswith(f"case '{case['name']}': ") for line in complaints) == 1
    assert f"has {limit} tokens" in stderr and f"token id {V}" in stderr
    assert_close(mixed, plain)


def test_without_a_good_case_nothing_is_written(run, capsys):
    assert run([{"name": "empty", "ids": []}]) == {}
    assert (run.code, capsys.readouterr().err.count("\n")) == (2, 1)
    assert list(run.out.parent.iterdir()) == [run.cases]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "is not JSON"),
        (b'{"name": "a", "text": "\xff"}', "is not UTF-8"),
        (b"[" * 100_000, "is not JSON"),
        (["a", [1]], "must be"),
        ({"name": "a"}, "must be"),
        ({"name": "a", "ids": [1], "text": "b"}, "must be"),
        ({"name": "a", "ids": [1], "cut": 2}, "must be"),
        ({"name": 3, "ids": [1]}, "name must be"),
        ({"name": "", "ids": [1]}, "name must be"),
        ({"name": "a/b", "ids": [1]}, "name must be"),
        ({"name": "a", "ids": [1.0]}, "ids must be"),
        ({"name": "a", "ids": [True]}, "ids must be"),
        ({"name": "a", "ids": "12"}, "ids must be"),
        ({"name": "a", "text": 12}, "text must be"),
        ({"name": "good", "ids": [1]}, "the name 'good' is taken"),
    ],
)
def test_a_malformed_line_is_named_before_the_model_is_looked_for(run, capsys, line, problem):
    run.folder = run.out.parent / "no-such-model"
    assert run([{"name": "good", "ids": [1]}, b"", line]) == {}
    assert run.code == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert stderr.startswith(f"{run.cases}, line 3: {problem}")


def test_a_file_without_cases_is_named(run, capsys):
    assert run([b"", b"  "]) == {}
    assert (run.code, capsys.readouterr().err) == (2, f"{run.cases}: holds no case\n")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--page-size", "7"), "page_size must be 8 to 256, got 7"),
        (("--batch", "0"), "max_sequences must be at least 1"),
        (("--chunk", "0"), "token_budget must be at least 1"),
        (("--new-tokens", "0"), "--new-tokens must be at least 1"),
        (("--backend", "cuda"), "argument --backend: 'cuda' is none of"),
        (("--backend", "mosaic_tpu"), "argument --backend: mosaic_tpu is for tpu, not cpu"),
        (("--out", "no-such-folder/out.npz"), "no-such-folder is no directory"),
    ],
)
def test_a_size_that_cannot_be_used_is_one_line(run, capsys, options, problem):
    with pytest.raises(SystemExit) as exit:
        run(as_lines(IDS), *options)
    assert exit.value.code == 2
    stderr = capsys.readouterr().err
    assert problem in stderr and stderr.count("\n") == 1
