"""Training: the forward pass it takes gradients of, and runs that go on where they stopped."""

import shutil
from dataclasses import replace
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.models.config import AttentionConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.dense import dense_logits
from jaxkv.models.errors import ModelError
from jaxkv.models.training import TrainConfig, Trainer, draw_batch, mean_loss
from tests.engine.tiny import TINY, V, decode_model
from tests.models.numpy_decoder import decode_naively

TEXT = np.tile(np.arange(40, dtype=np.int32), 30)  # what follows what is easily learnt
CONFIG = TrainConfig(num_steps=12, batch=4, length=24, learning_rate=3e-3, warmup=2)
CAPPED = replace(
    TINY,
    post_norms=True,
    attention=AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=8, scale=0.35, soft_cap=5.0, qk_norm=True
    ),
)


@pytest.mark.parametrize("config", [TINY, CAPPED], ids=["windows", "norms and caps"])
def test_logits_without_a_cache_are_those_of_a_naive_decoder(config):
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(1).integers(0, V, (2, 30)).astype(np.int32)
    got = dense_logits(decoder, tokens)
    for row, own in zip(tokens, got, strict=True):
        chex.assert_trees_all_close(
            own, decode_naively(decoder, row.tolist()), rtol=1e-7, atol=2e-5
        )


def model():
    return decode_model(Decoder(TINY, rngs=nnx.Rngs(0)))


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path):
    whole = Trainer(model(), TEXT, CONFIG)
    whole.run()
    first = Trainer(model(), TEXT, CONFIG)
    assert not first.restore(tmp_path / "state")
    first.run(5)
    first.save(tmp_path / "state")
    rest = Trainer(model(), TEXT, CONFIG)
    assert rest.restore(tmp_path / "state") and rest.step == 5
    rest.run()
    assert first.losses + rest.losses == whole.losses
    for one, other in zip(rest.model.params, whole.model.params, strict=True):
        chex.assert_trees_all_equal(one, other)
    assert whole.losses[-1] < 0.8 * whole.losses[0]
    assert abs(mean_loss(whole.model, TEXT, length=24) / whole.losses[-1] - 1) < 0.2
    with pytest.raises(ModelError, match="is at step 5, the run has 4"):
        Trainer(model(), TEXT, replace(CONFIG, num_steps=4)).restore(tmp_path / "state")


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> Path:
    """Saves the state of a run after no steps, in bfloat16."""
    path = tmp_path_factory.mktemp("run") / "state"
    Trainer(bfloat16(model()), TEXT, CONFIG).save(path)
    return path


def bfloat16(model):
    params = tuple(x.astype(jnp.bfloat16) for x in model.params)
    return replace(model, params=params)


def test_a_state_is_of_the_types_that_it_was_made_of(state):
    trainer = Trainer(bfloat16(decode_model(Decoder(TINY, rngs=nnx.Rngs(1)))), TEXT, CONFIG)
    assert trainer.restore(state)
    for one, other in zip(trainer.model.params, bfloat16(model()).params, strict=True):
        assert one.dtype == jnp.bfloat16
        chex.assert_trees_all_equal(one, other)
    with pytest.raises(ModelError, match=r"state: is the state of another model"):
        Trainer(model(), TEXT, CONFIG).restore(state)


@pytest.mark.parametrize("kind", ["missing", "empty", "cut", "a bit flipped", "something else"])
@pytest.mark.parametrize("name", ["sums.json", "the largest"])
def test_a_damaged_state_is_one_line_that_names_the_file(tmp_path, state, name, kind):
    folder = tmp_path / "state"
    shutil.copytree(state, folder)
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "sums.json"]
    path = folder / name if name == "sums.json" else max(files, key=lambda x: x.stat().st_size)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    damaged = {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "a bit flipped": bytes(flipped),
        "something else": b"{}",
    }
    path.unlink()
    trainer = Trainer(bfloat16(model()), TEXT, CONFIG)
    if kind in damaged:
        path.write_bytes(damaged[kind])
    elif name == "sums.json":
        assert not trainer.restore(folder)  # as of a run that was killed before it wrote them
        trainer.save(folder)
        assert trainer.restore(folder)
        return
    with pytest.raises(ModelError) as refusal:
        trainer.restore(folder)
    assert str(refusal.value).startswith(f"{folder}")
    assert path.name in str(refusal.value) or kind == "a bit flipped"  # which may be in a name
    assert "\n" not in str(refusal.value) and trainer.step == 0


def test_a_loss_that_is_not_finite_stops_the_run():
    trainer = Trainer(model(), TEXT, replace(CONFIG, learning_rate=1e30))
    with pytest.raises(ModelError, match=r"the loss of step \d+ is (nan|inf); a lower"):
        trainer.run()
    assert np.isfinite(trainer.losses).all()


def test_a_model_stays_as_it_was_while_a_copy_of_it_is_trained():
    start = model()
    before = [np.array(x) for x in start.params]
    trainer = Trainer(start, TEXT, CONFIG)
    trainer.run(2)
    trained = trainer.model
    trainer.run(4)
    for one, other in zip(start.params, before, strict=True):
        chex.assert_trees_all_equal(one, other)
    assert all(np.isfinite(x).all() for x in trained.params)


@pytest.mark.slow
def test_a_distilled_model_comes_near_its_teacher():
    teacher = decode_model(Decoder(TINY, rngs=nnx.Rngs(1)))
    config = replace(CONFIG, distil=1.0, num_steps=30)
    trainer = Trainer(model(), TEXT, config, teacher=teacher)
    trainer.run()
    assert trainer.losses[-1] < 0.5 * trainer.losses[0]


def test_batches_depend_on_seed_and_step_alone():
    one, same, other = (draw_batch(TEXT, CONFIG, step) for step in (3, 3, 4))
    chex.assert_trees_all_equal(one, same)
    assert one.shape == (4, 25) and not np.array_equal(one, other)
    assert not np.array_equal(one, draw_batch(TEXT, replace(CONFIG, seed=1), 3))


@pytest.mark.parametrize(
    "tokens, options, message",
    [
        (TEXT[:24], {}, "a text of 24 tokens; 25 at least"),
        (TEXT, dict(distil=0.5), "distilling needs a teacher"),
    ],
)
def test_what_cannot_be_trained_is_refused(tokens, options, message):
    with pytest.raises(ModelError, match=message):
        Trainer(model(), tokens, replace(CONFIG, **options))
