"""Training a decoder on text: next-token loss, optionally distilled from another decoder.

A run depends only on its model, tokens and config: batch i is drawn by seed and i, so that a run
that was stopped and continues from its last state ends with the same bits. It uses one device, and
the tokens are in memory.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from jaxkv.models.decode_model import FlaxDecodeModel, Params
from jaxkv.models.dense import dense_logits
from jaxkv.models.errors import ModelError
from jaxkv.models.whole_files import are_sums, check_sums, sums_of, write_whole

OnStep = Callable[[int, float], object]
SUMS = "sums.json"  # of the files of the last state, in the folder of states
_ANEW = "without the folder of states the run begins anew"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a decoder is trained.

    Attributes:
      num_steps: updates of the whole run.
      batch: sequences per update.
      length: tokens per sequence.
      learning_rate: at its peak, after `warmup` steps.
      warmup: steps.
      decay: part of the learning rate that is left at the end, after a cosine; 1 keeps it.
      weight_decay: weight decay of matrices (AdamW).
      distil: part of the loss that is KL(teacher || model); the rest is the next token's.
      seed: seed of the batches.
    """

    num_steps: int
    batch: int = 16
    length: int = 128
    learning_rate: float = 1e-3
    warmup: int = 20
    decay: float = 0.1
    weight_decay: float = 0.1
    distil: float = 0.0
    seed: int = 0


class Trainer:
    """A run: parameters, optimizer state, and how many steps are done.

    Attributes:
      config: how the run is done.
      step: updates so far.
      losses: losses of the updates since this object was made, in nats per token.
    """

    def __init__(
        self,
        model: FlaxDecodeModel,
        tokens: np.ndarray,
        config: TrainConfig,
        *,
        teacher: FlaxDecodeModel | None = None,
    ):
        """Takes a model at step 0.

        Args:
          model: where the run starts.
          tokens: tokens of the text, `[n]` int32.
          config: how.
          teacher: whose distribution is distilled.

        Raises:
          ModelError: the text is shorter than a sequence, or distilling lacks a teacher.
        """
        if len(tokens) <= config.length:
            raise ModelError(f"a text of {len(tokens)} tokens; {config.length + 1} at least")
        if (teacher is None) != (config.distil == 0):
            raise ModelError("distilling needs a teacher and a part of the loss above 0")
        self._model, self._tokens, self.config = model, tokens, config
        self._teacher_params = () if teacher is None else teacher.params
        optimizer = _optimizer(config)
        # A copy: the updates are in place.
        self._state = jax.tree.map(jnp.array, (model.params, optimizer.init(model.params)))
        self.step = 0
        self.losses: list[float] = []

        def update(
            state: tuple[Params, Any], teacher_params: Params, batch: jax.Array
        ) -> tuple[tuple[Params, Any], jax.Array]:
            params, moments = state

            def loss(params: Params) -> jax.Array:
                logits = dense_logits(model.decoder(params), batch[:, :-1])
                mean = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
                if teacher is None:
                    return mean
                other = dense_logits(teacher.decoder(teacher_params), batch[:, :-1])
                known = jax.nn.log_softmax(other)
                own = jax.nn.log_softmax(logits)
                distance = (jnp.exp(known) * (known - own)).sum(axis=-1).mean()
                return (1 - config.distil) * mean + config.distil * distance

            value, gradients = jax.value_and_grad(loss)(params)
            with jax.numpy_dtype_promotion("standard"):  # optax multiplies floats and counts
                updates, moments = optimizer.update(gradients, moments, params)
            new: Any = optax.apply_updates(params, updates)
            return (new, moments), value

        self._update = jax.jit(update, donate_argnums=0)

    @property
    def model(self) -> FlaxDecodeModel:
        """The decoder as it is now."""
        params = tuple(jax.tree.map(jnp.array, self._state[0]))
        model = self._model
        return FlaxDecodeModel(model.config, model.graphdef, model.paths, params)

    def run(self, until: int | None = None, on_step: OnStep = lambda step, loss: None) -> None:
        """Runs up to step `until`; None runs to the end. `on_step` gets each step and its loss.

        Raises:
          ModelError: a loss is not finite; nothing that follows from it would be.
        """
        end = self.config.num_steps if until is None else min(until, self.config.num_steps)
        while self.step < end:
            batch = draw_batch(self._tokens, self.config, self.step)
            self._state, loss = self._update(self._state, self._teacher_params, batch)
            self.step += 1
            value = float(loss)
            if not math.isfinite(value):
                raise ModelError(
                    f"the loss of step {self.step} is {value}; a lower learning rate may help"
                )
            self.losses.append(value)
            on_step(self.step, value)

    def save(self, folder: Path) -> None:
        """Writes a state that `restore` goes on from, and keeps the one before.

        It counts once its sums are written: a run that is killed before goes on from the other.
        """
        with _manager(folder) as manager:
            if self.step in manager.all_steps():  # without sums
                manager.delete(self.step)
            manager.save(self.step, args=ocp.args.StandardSave(self._leaves()))
        text = json.dumps({"step": self.step, "files": sums_of(folder / str(self.step))})
        write_whole(folder / SUMS, text)

    def restore(self, folder: Path) -> bool:
        """Goes on from the last state in a folder, if there is one.

        Raises:
          ModelError: it is damaged, or of another model or run.
        """
        if not (folder / SUMS).exists():
            return False
        step = _checked_step(folder)
        if step > self.config.num_steps:
            raise ModelError(f"{folder}: is at step {step}, the run has {self.config.num_steps}")
        own = self._leaves()
        with _manager(folder) as manager:
            stored = manager.item_metadata(step)
            if {name: _kind(stored[name]) for name in stored} != {n: _kind(own[n]) for n in own}:
                raise ModelError(f"{folder}: is the state of another model; name another place")
            leaves = manager.restore(step, args=ocp.args.StandardRestore(own))
        treedef = jax.tree.structure(self._state)
        self._state = jax.tree.unflatten(treedef, [leaves[name] for name in sorted(leaves)])
        self.step = step
        return True

    def _leaves(self) -> dict[str, jax.Array]:
        return {f"{i:05}": leaf for i, leaf in enumerate(jax.tree.leaves(self._state))}


def _manager(folder: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    # Known beforehand, so that what is stored can be asked before it is read.
    handler = ocp.StandardCheckpointHandler()
    return ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handler)


def _checked_step(folder: Path) -> int:
    """The step of the last state, all of whose files are as they were written.

    Before Orbax reads any: a read that fails leaves its neighbours' unfinished.
    """
    try:
        found = json.loads((folder / SUMS).read_bytes())
        step, sums = found["step"], found["files"]
    except (ValueError, TypeError, KeyError):
        step, sums = None, None
    if not isinstance(step, int) or not are_sums(sums):
        raise ModelError(f"{folder / SUMS}: is damaged; {_ANEW}")
    check_sums(folder / str(step), sums, _ANEW)
    return step


def _kind(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(leaf.shape), jnp.dtype(leaf.dtype)


def draw_batch(tokens: np.ndarray, config: TrainConfig, step: int) -> np.ndarray:
    """`[batch, length + 1]` int32, sequences that begin anywhere in the text."""
    rng = np.random.default_rng((config.seed, step))
    starts = rng.integers(0, len(tokens) - config.length, config.batch)
    return tokens[starts[:, None] + np.arange(config.length + 1)].astype(np.int32)


def mean_loss(
    model: FlaxDecodeModel, tokens: np.ndarray, *, batch: int = 16, length: int = 128
) -> float:
    """Nats per token over all whole sequences of a text, one after the other."""
    count = (len(tokens) - 1) // length
    rows = np.arange(count)[:, None] * length + np.arange(length + 1)
    loss = _losses_of(model)
    parts = [loss(model.params, tokens[rows[i : i + batch]]) for i in range(0, count, batch)]
    return float(np.concatenate(parts).mean())


def _losses_of(model: FlaxDecodeModel) -> Callable[[Params, np.ndarray], jax.Array]:
    @jax.jit
    def losses(params: Params, batch: jax.Array) -> jax.Array:
        logits = dense_logits(model.decoder(params), batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean(axis=-1)

    return losses


def _optimizer(config: TrainConfig) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(config.warmup, max(1, config.num_steps // 2)),
        decay_steps=max(2, config.num_steps),
        end_value=config.learning_rate * config.decay,
    )
    decay = optax.adamw(
        rate,
        b2=0.95,
        weight_decay=config.weight_decay,
        mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
    )
    return optax.chain(optax.clip_by_global_norm(1.0), decay)
