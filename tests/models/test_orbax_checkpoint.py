"""A checkpoint of our own brings back every bit, and is refused in one line where it is damaged."""

import json
import shutil
from pathlib import Path

import chex
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from jaxkv.models import orbax_checkpoint
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import LoadedModel, load_model
from jaxkv.models.orbax_checkpoint import HEADER, open_orbax, save_checkpoint
from tests.models.tiny_checkpoint import CONFIG, write_gguf, write_hf

TEXT = "the other\n the  42<|im_end|>"


def assert_same_params(found: LoadedModel, expected: LoadedModel) -> None:
    assert found.model.paths == expected.model.paths
    for path, value in found.model.named_params.items():
        wanted = expected.model.named_params[path]
        assert value.dtype == wanted.dtype
        chex.assert_trees_all_equal(value, wanted, custom_message=str(path))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint in float32; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("saved")
    save_checkpoint(folder / "own", load_model(str(write_hf(folder / "source"))))
    return folder / "own"


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "own"))


@pytest.mark.parametrize("source", ["hugging-face", "gguf"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_model_comes_back_as_it_was_saved(tmp_path, source, dtype):
    path = write_gguf(tmp_path / "a.gguf") if source == "gguf" else write_hf(tmp_path / "a")
    loaded = load_model(str(path), dtype)
    save_checkpoint(tmp_path / "own", loaded)
    found = open_orbax(tmp_path / "own")
    assert_same_params(found, loaded)
    assert found.model.config == loaded.model.config
    tokenizer, expected = found.require_tokenizer(), loaded.require_tokenizer()
    assert tokenizer.encode(TEXT) == expected.encode(TEXT)
    assert tokenizer.stop_ids == expected.stop_ids
    assert tokenizer.chat_template == expected.chat_template


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2", "tie_word_embeddings": False},
        {"model_type": "qwen3"},
        {"model_type": "gemma3_text", "sliding_window": 24},
    ],
    ids=["biases-and-head", "qk-norms", "post-norms"],
)
def test_parameters_of_every_kind_come_back(tmp_path, changes):
    loaded = load_model(str(write_hf(tmp_path / "a", config=CONFIG | changes)))
    save_checkpoint(tmp_path / "own", loaded)
    found = open_orbax(tmp_path / "own")
    assert_same_params(found, loaded)
    assert found.model.config == loaded.model.config


def test_another_dtype_is_a_rounding_of_the_matrices_and_leaves_the_norms(saved):
    found, exact = open_orbax(saved, jnp.bfloat16), open_orbax(saved)
    for path, value in exact.model.named_params.items():
        wanted = value if path[-2:-1] and "norm" in str(path[-2]) else value.astype(jnp.bfloat16)
        assert found.model.named_params[path].dtype == wanted.dtype
        chex.assert_trees_all_equal(
            found.model.named_params[path], wanted, custom_message=str(path)
        )


def test_a_checkpoint_of_a_checkpoint_is_the_same(saved, tmp_path):
    first = open_orbax(saved)
    save_checkpoint(tmp_path / "again", first)
    second = load_model(str(tmp_path / "again"))
    assert_same_params(second, first)
    assert second.require_tokenizer().encode(TEXT) == first.require_tokenizer().encode(TEXT)


def test_a_model_without_tokenizer_is_saved_without(tmp_path):
    save_checkpoint(tmp_path / "own", load_model(str(write_hf(tmp_path / "a", tokenizer=False))))
    assert open_orbax(tmp_path / "own").tokenizer is None


def test_a_directory_that_holds_something_is_left_as_it_is(saved, tmp_path):
    loaded = open_orbax(saved)
    (tmp_path / "file").write_text("mine")
    for path in (saved, tmp_path, tmp_path / "file"):
        with pytest.raises(ModelError, match="exists already"):
            save_checkpoint(path, loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_directory_is_filled(saved, tmp_path):
    (tmp_path / "own").mkdir()
    save_checkpoint(tmp_path / "own", open_orbax(saved))
    assert_same_params(open_orbax(tmp_path / "own"), open_orbax(saved))


def test_a_write_that_breaks_off_leaves_nothing(saved, tmp_path, monkeypatch):
    def fail(model: object, folder: Path) -> None:
        folder.mkdir()
        raise OSError(28, "No space left on device")

    loaded = open_orbax(saved)
    monkeypatch.setattr(orbax_checkpoint, "_save_params", fail)
    with pytest.raises(ModelError, match="own: cannot be written: No space left on device"):
        save_checkpoint(tmp_path / "own", loaded)
    assert list(tmp_path.iterdir()) == []


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_orbax(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory_of_another_program_is_refused(tmp_path):
    folder = tmp_path / "theirs"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, {"w": jnp.zeros(3)})
    assert refusal(folder).startswith(f"{folder}: has no {HEADER}")
    assert refusal(tmp_path / "missing").startswith(f"{tmp_path / 'missing'}: has no {HEADER}")


def changed_header(folder: Path, **changes: object) -> None:
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps(header | changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 2}, "is of version 2, and only 1 is read"),
        ({"files": None}, "is damaged"),
        ({"files": {"params": 3}}, "is damaged"),
        ({"dtype": 3}, "is damaged"),
        ({"dtype": "float31"}, "is damaged"),
        ({"config": {"family": "llama"}}, "config: has no vocab_size"),
    ],
)
def test_a_header_that_cannot_be_read_is_refused(copied, changes, problem):
    changed_header(copied, **changes)
    message = refusal(copied)
    assert message.startswith(str(copied / HEADER)) and problem in message


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\ud800"])
def test_a_header_that_is_no_json_object_is_refused(copied, content):
    (copied / HEADER).write_bytes(content.encode(errors="surrogatepass"))
    assert refusal(copied) == f"{copied / HEADER}: is damaged; write the checkpoint again"


def test_every_file_is_missed_when_it_is_gone_cut_or_changed(copied):
    files = [file for file in copied.rglob("*") if file.is_file() and file.name != HEADER]
    assert len(files) > 3
    for file in files:
        whole = file.read_bytes()
        file.unlink()
        assert refusal(copied).startswith(f"{file}: is missing")
        if whole:
            file.write_bytes(whole[:-1])
            assert refusal(copied).startswith(f"{file}: has {len(whole) - 1} bytes in place of")
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            assert refusal(copied) == f"{file}: is damaged; copy or write the checkpoint again"
        file.write_bytes(whole)
    open_orbax(copied)


def test_values_that_do_not_fit_the_config_are_refused(copied):
    config = json.loads((copied / HEADER).read_text())["config"]
    changed_header(copied, config=config | {"mlp_width": CONFIG["intermediate_size"] + 1})
    F, E = CONFIG["intermediate_size"], CONFIG["hidden_size"]
    assert refusal(copied) == (
        f"{copied / 'params'}: layers.0.mlp.down.weight has shape {(E, F)}, and {HEADER} says "
        f"{(E, F + 1)}; copy or write the checkpoint again"
    )
