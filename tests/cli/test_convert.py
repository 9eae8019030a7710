"""`python scripts convert` writes what `--model` takes."""

import chex
import pytest

from jaxkv.cli import console, convert
from jaxkv.models.loading import load_model
from tests.models.tiny_checkpoint import write_gguf


@pytest.mark.parametrize(("option", "dtype"), [("f32", "float32"), ("bf16", "bfloat16")])
def test_what_it_writes_loads_as_the_model(tmp_path, capsys, option, dtype):
    path, out = write_gguf(tmp_path / "model.gguf"), tmp_path / "deep" / "out"
    assert (
        console.run(convert.main, ["--model", str(path), "--out", str(out), "--dtype", option]) == 0
    )
    assert capsys.readouterr().out.startswith(f"{out}: {path} in {option}, ")
    found, expected = load_model(str(out), dtype), load_model(str(path), dtype)
    for value, wanted in zip(found.model.params, expected.model.params, strict=True):
        chex.assert_trees_all_equal(value, wanted)
    assert found.require_tokenizer().encode("the") == expected.require_tokenizer().encode("the")


def test_a_directory_in_use_is_refused_before_the_model_is_looked_for(tmp_path, capsys):
    (tmp_path / "file").touch()
    argv = ["--model", str(tmp_path / "no-such-model"), "--out", str(tmp_path)]
    assert console.run(convert.main, argv) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path}: exists already; name a new or empty directory\n"
    )
