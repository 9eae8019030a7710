"""`python scripts score`: what it writes is the model's, whatever the engine's sizes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models.loading import LoadedModel, load_model
from scripts import console, score
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
    config = CONFIG | {"model_type": "mistral", "sliding_window": 20}
    return write_hf(tmp_path_factory.mktemp("score") / "model", config=config)


@pytest.fixture(scope="module")
def loaded(folder) -> LoadedModel:
    return load_model(str(folder))


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch):
    # It is a setting of the whole process, and would stay on for other tests.
    monkeypatch.setattr(console, "enable_compilation_cache", lambda: None)


class Scoring:
    """Runs the command on a model: `code`, `stderr` and `arrays` are those of the last run."""

    def __init__(self, folder: Path, tmp_path: Path, capsys):
        self.folder, self.tmp_path, self.capsys = folder, tmp_path, capsys
        self.out = tmp_path / "out.npz"

    def __call__(self, lines: Sequence[Any], *options: str) -> dict[str, np.ndarray]:
        """Scores lines, which are JSON values or, as bytes, lines as they are."""
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (self.tmp_path / "cases.jsonl").write_bytes(b"\n".join(raw))
        argv = ["--model", str(self.folder), "--in", str(self.tmp_path / "cases.jsonl")]
        argv += ["--out", str(self.out), "--new-tokens", str(NEW_TOKENS)]
        argv += ["--batch", "2", "--chunk", "64", *options]  # few shapes to compile
        self.code = console.run(score.main, argv)
        self.stdout, self.stderr = self.capsys.readouterr()
        if not self.out.exists():
            return {}
        with np.load(self.out) as stored:
            return dict(stored)


@pytest.fixture
def run(folder, tmp_path, capsys) -> Scoring:
    return Scoring(folder, tmp_path, capsys)


def as_lines(cases: dict[str, list[int]]) -> list[dict[str, Any]]:
    return [{"name": name, "ids": ids} for name, ids in cases.items()]


@pytest.mark.parametrize(
    "options",
    [
        ("--chunk", "512", "--batch", "8"),
        ("--page-size", "8", "--chunk", "16"),
        ("--deterministic", "--page-size", "64"),
        ("--backend", "reference", "--batch", "1"),
    ],
    ids=["unchunked", "small-chunks", "deterministic", "reference"],
)
def test_every_array_is_that_of_a_decoder_without_cache(run, loaded, options):
    arrays = run(as_lines(IDS), *options)
    assert (run.code, run.stderr) == (0, "")
    assert arrays.keys() == {f"{name}/{key}" for name in IDS for key in KEYS}
    decoder = loaded.model.decoder(loaded.model.params)
    for name, ids in IDS.items():
        found = {key: arrays[f"{name}/{key}"] for key in KEYS}
        assert {key: value.dtype for key, value in found.items()} == KEYS
        tokens = [*ids, *found["cont_ids"].tolist()]
        logits = decode_naively(decoder, tokens)
        logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        chosen = [logprobs[i, token] for i, token in enumerate(tokens[1:])]
        n = len(ids)
        assert found["ids"].tolist() == ids
        assert np.isnan(found["prompt_logprobs"][0])
        np.testing.assert_allclose(found["prompt_logprobs"][1:], chosen[: n - 1], atol=1e-4)
        np.testing.assert_allclose(found["logits_last"], logits[n - 1], atol=1e-4)
        assert found["cont_ids"].tolist() == logits[n - 1 : -1].argmax(axis=-1).tolist()
        np.testing.assert_allclose(found["cont_logprobs"], chosen[n - 1 :], atol=1e-4)
        best = np.sort(logits[n - 1 : -1], axis=-1)
        np.testing.assert_allclose(found["cont_margin"], best[:, -1] - best[:, -2], atol=1e-4)


def test_deterministic_logits_have_the_same_bits_whatever_the_sizes(run):
    cases = as_lines(IDS)
    first = run(cases, "--deterministic")
    second = run(
        cases[::-1], "--deterministic", "--page-size", "8", "--chunk", "24", "--batch", "2"
    )
    assert first.keys() == second.keys()
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key], err_msg=key)


def test_a_text_is_scored_as_its_ids(run, loaded):
    text = "the other the"
    ids = loaded.require_tokenizer().encode(text)
    arrays = run([{"name": "text", "text": text}, {"name": "ids", "ids": ids}])
    assert arrays["text/ids"].tolist() == ids
    for key in KEYS:
        np.testing.assert_allclose(arrays[f"text/{key}"], arrays[f"ids/{key}"], atol=1e-5)


def test_a_continuation_does_not_stop_at_stop_tokens(run, loaded):
    (stop,) = loaded.require_tokenizer().stop_ids
    assert len(run([{"name": "stop", "ids": [stop]}])["stop/cont_ids"]) == NEW_TOKENS


def test_weights_may_be_bfloat16(run):
    wide, narrow = run(as_lines(IDS)), run(as_lines(IDS), "--dtype", "bf16")
    for name in IDS:
        key = f"{name}/logits_last"
        assert 0 < np.abs(wide[key] - narrow[key]).max() < 0.3


def test_a_continuation_ends_where_the_models_longest_sequence_does(run):
    longest = CONFIG["max_position_embeddings"]
    arrays = run(as_lines({"near": [1] * (longest - 2), "last": [1] * (longest - 1)}))
    assert run.code == 0
    assert [len(arrays[f"{name}/cont_ids"]) for name in ("near", "last")] == [2, 1]


def test_a_case_that_the_model_cannot_take_is_left_out_alone(run):
    limit = CONFIG["max_position_embeddings"]
    bad = [
        {"name": "too long", "ids": [1] * limit},
        {"name": "empty", "ids": []},
        {"name": "no text", "text": ""},
        {"name": "unknown id", "ids": [1, V]},
        {"name": "negative", "ids": [-1]},
    ]
    alone = run(as_lines(IDS))
    mixed = run([bad[0], *as_lines(IDS), *bad[1:]])
    assert run.code == 2
    complaints = run.stderr.splitlines()
    assert len(complaints) == len(bad)
    for case in bad:
        assert sum(line.startswith(f"case '{case['name']}': ") for line in complaints) == 1
    assert f"has {limit} tokens" in run.stderr and f"token id {V}" in run.stderr
    assert mixed.keys() == alone.keys()
    for key, value in alone.items():
        np.testing.assert_array_equal(value, mixed[key], err_msg=key)


def test_without_a_good_case_nothing_is_written(run):
    assert run([{"name": "empty", "ids": []}]) == {}
    assert (run.code, run.stderr.count("\n")) == (2, 1)
    assert not any(path.suffix == ".partial" for path in run.tmp_path.iterdir())


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
def test_a_malformed_line_is_named_before_the_model_is_looked_for(run, line, problem):
    run.folder = run.tmp_path / "no-such-model"
    assert run([{"name": "good", "ids": [1]}, b"", line]) == {}
    assert run.code == 2
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith(f"{run.tmp_path / 'cases.jsonl'}, line 3: {problem}")


def test_a_file_without_cases_is_named(run):
    assert run([b"", b"  "]) == {}
    assert (run.code, run.stderr) == (2, f"{run.tmp_path / 'cases.jsonl'}: holds no case\n")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--page-size", "7"), "page_size must be 8 to 256, got 7"),
        (("--batch", "0"), "max_sequences must be at least 1"),
        (("--chunk", "0"), "token_budget must be at least 1"),
        (("--new-tokens", "0"), "--new-tokens must be at least 1"),
        (("--backend", "cuda"), "argument --backend: invalid choice"),
        (("--out", "no-such-folder/out.npz"), "no-such-folder is no directory"),
    ],
)
def test_a_size_that_cannot_be_used_is_one_line(run, options, problem):
    with pytest.raises(SystemExit) as exit:
        run(as_lines(IDS), *options)
    assert exit.value.code == 2
    stderr = run.capsys.readouterr().err
    assert problem in stderr and stderr.count("\n") == 1
