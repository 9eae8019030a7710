"""Every form of model comes through one door, as the same model, within its own size in memory."""

import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv.models import loading
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import LoadedModel, load_model
from jaxkv.models.orbax_checkpoint import save_checkpoint
from tests.conftest import ROOT
from tests.models import tiny_checkpoint
from tests.models.tiny_checkpoint import random_weights, write_gguf, write_hf


def orbax(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "orbax", load_model(str(write_hf(tmp_path / "source"))))
    return tmp_path / "orbax"


FORMS = {
    "hugging-face": lambda tmp_path: write_hf(tmp_path / "model"),
    "sharded": lambda tmp_path: write_hf(tmp_path / "model", shards=3),
    "gguf": lambda tmp_path: write_gguf(tmp_path / "model.gguf"),
    "orbax": orbax,
}


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def path(request, tmp_path) -> Path:
    return request.param(tmp_path)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_parameters_are_the_weights_on_disk(path, dtype):
    loaded = load_model(str(path), dtype)
    found = {".".join(map(str, at)): value for at, value in loaded.model.named_params.items()}
    weights = random_weights()
    expected = {
        "embedding": weights["model.embed_tokens.weight"],
        "final_norm.weight": weights["model.norm.weight"],
    }
    for i in range(2):
        of = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): value
            for name, value in weights.items()
        }
        q, k, v = (of[f"self_attn.{part}_proj"] for part in "qkv")
        expected |= {
            f"layers.{i}.attention.qkv.weight": np.concatenate([q, k, v]),
            f"layers.{i}.attention.out.weight": of["self_attn.o_proj"],
            f"layers.{i}.mlp.gate_up.weight": np.concatenate(
                [of["mlp.gate_proj"], of["mlp.up_proj"]]
            ),
            f"layers.{i}.mlp.down.weight": of["mlp.down_proj"],
            f"layers.{i}.attention_norm.weight": of["input_layernorm"],
            f"layers.{i}.mlp_norm.weight": of["post_attention_layernorm"],
        }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        wanted = jnp.asarray(values, jnp.float32 if values.ndim == 1 else dtype)
        assert found[name].dtype == wanted.dtype
        chex.assert_trees_all_equal(found[name], wanted, custom_message=name)


def test_the_tokenizer_comes_along(path):
    tokenizer = load_model(str(path)).require_tokenizer()
    ids = tokenizer.encode("the other the<|im_end|>")
    assert ids[0] == tiny_checkpoint.vocabulary().index("the") and ids[-1] in tokenizer.stop_ids
    assert tokenizer.decode(ids) == "the other the"


def test_progress_counts_the_bytes_of_all_parameters(path):
    calls: list[tuple[int, int]] = []
    loaded = load_model(str(path), progress=lambda done, total: calls.append((done, total)))
    total = sum(value.nbytes for value in loaded.model.params)
    assert {t for _, t in calls} == {total} and calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_a_released_model_is_known_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "model_path", lambda name: write_gguf(tmp_path / f"{name}.gguf"))
    loaded = load_model("smollm2-135m")
    assert (loaded.name, loaded.source) == ("smollm2-135m", tmp_path / "smollm2-135m.gguf")


@pytest.mark.parametrize("kind", ["missing", "empty folder", "text file"])
def test_anything_else_is_told_what_may_be_given(tmp_path, kind):
    path = tmp_path / "thing"
    if kind == "empty folder":
        path.mkdir()
    if kind == "text file":
        path.write_text("weights")
    with pytest.raises(ModelError) as caught:
        load_model(str(path))
    message = str(caught.value)
    assert message.startswith(repr(str(path))) and "\n" not in message
    for form in ("smollm2-135m", "gemma3-270m", "config.json", ".gguf", "convert"):
        assert form in message


def test_a_damaged_model_is_refused_by_the_reader_of_its_form(tmp_path):
    folder = write_hf(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated"):
        load_model(str(folder))


def without_tokenizer(tmp_path: Path, kind: str) -> LoadedModel:
    if kind == "gguf":
        return load_model(str(write_gguf(tmp_path / "bare.gguf", pre=None)))
    return load_model(str(write_hf(tmp_path / "bare", tokenizer=False)))


@pytest.mark.parametrize("kind", ["gguf", "hugging-face"])
def test_weights_alone_load_and_say_so_when_text_is_asked_for(tmp_path, kind):
    loaded = without_tokenizer(tmp_path, kind)
    assert loaded.tokenizer is None
    with pytest.raises(ModelError, match=r"bare.*: has no tokenizer"):
        loaded.require_tokenizer()


def test_a_tokenizer_that_is_not_known_is_refused_with_the_file(tmp_path):
    path = write_gguf(tmp_path / "odd.gguf", pre="no-such-kind")
    with pytest.raises(ModelError, match=r"odd\.gguf: .*no-such-kind"):
        load_model(str(path))


@pytest.mark.parametrize("dtype", [np.int8, np.float64], ids=["int8", "float64"])
def test_a_dtype_that_weights_cannot_have_is_refused_by_name(tmp_path, dtype):
    with pytest.raises(ModelError, match=np.dtype(dtype).name):
        load_model(str(write_hf(tmp_path / "model")), dtype)


def test_jit_has_a_flat_tuple_of_parameters_to_walk(tmp_path):
    params = load_model(str(write_hf(tmp_path / "model"))).model.params
    # A container more for every layer would cost Python time at every step.
    assert jax.tree.structure(params).num_nodes == 1 + len(params)


MEASURE = """
import re, sys
from pathlib import Path
from jaxkv.models.loading import load_model

def peak():
    # The peak of only this program: getrusage includes that of the process it was forked from.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

load_model(sys.argv[2])  # everything imported and warm
before = peak()
loaded = load_model(sys.argv[1], sys.argv[3])
print((peak() - before) / sum(p.nbytes for p in loaded.model.params))
"""
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads a process's peak memory from Linux"
)


def peak_over_weights(path: Path, small: Path, dtype: str) -> float:
    """Growth of a fresh process's peak memory while it loads, over the size of the weights."""
    command = [sys.executable, "-c", MEASURE, str(path), str(small), dtype]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(result.stdout)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """52 M parameters in bfloat16 and three files; the last tensor is a quarter of them."""
    config = tiny_checkpoint.CONFIG | {
        "vocab_size": 16_000,
        "hidden_size": 800,
        "intermediate_size": 2_400,
        "num_hidden_layers": 6,
        "head_dim": 16,
    }
    shapes = {name: value.shape for name, value in random_weights(config).items()}
    last = shapes.pop("model.embed_tokens.weight")
    weights = {
        name: np.ones(shape, ml_dtypes.bfloat16)
        for name, shape in (*shapes.items(), ("model.embed_tokens.weight", last))
    }
    return write_hf(tmp_path_factory.mktemp("large") / "model", weights, config=config, shards=3)


@needs_proc
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_directory_loads_within_1_3_times_its_weights(large, tmp_path, dtype):
    assert 0.9 < peak_over_weights(large, write_hf(tmp_path / "small"), dtype) < 1.3


@needs_proc
def test_an_orbax_checkpoint_loads_within_twice_its_weights(large, tmp_path):
    # In addition to the weights Orbax has a cache of 100 MB, with any model.
    save_checkpoint(tmp_path / "own", load_model(str(large)))
    assert 0.9 < peak_over_weights(tmp_path / "own", orbax(tmp_path), "float32") < 2


@needs_proc
def test_a_quantised_file_loads_within_1_3_times_its_weights_in_float32(smollm2_path, tmp_path):
    small = write_gguf(tmp_path / "small.gguf")
    assert 0.9 < peak_over_weights(smollm2_path, small, "float32") < 1.3
