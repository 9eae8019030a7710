"""Training a decoder on text: next-token loss, optionally distilled from another decoder.

A run depends only on its model, tokens and config. The seed and i determine batch i, so a run that
was stopped and continues from its last state ends with the same bits. It uses one device, and all
tokens are in memory.
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
SUMS = "sums.json"  # has the sums of the files of the last state; in the folder of states
_ANEW = "without the folder of states the run begins anew"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a decoder is trained.

    Attributes:
      num_steps: number of updates in the whole run.
      batch: sequences per update.
      length: tokens per sequence.
      learning_rate: the highest learning rate, reached after `warmup` steps.
      warmup: number of steps in which the learning rate rises.
      decay: part of the learning rate that remains at the end of its cosine; 1 keeps all of it.
      weight_decay: weight decay of the matrices (AdamW).
      distil: weight of KL(teacher || model) in the loss; the next-token loss has the rest.
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
    """A run: its parameters, its optimizer state and the number of steps so far.

    Attributes:
      config: how the decoder is trained.
      step: number of updates so far.
      losses: loss of each update since this object was made, in nats per token.
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
          model: the decoder at the start of the run.
          tokens: tokens of the text, `[n]` int32.
          config: how the decoder is trained.
          teacher: the decoder whose distribution is distilled.

        Raises:
          ModelError: the text is shorter than a sequence, or only one of `teacher` and
            `config.distil` is given.
        """
        if len(tokens) <= config.length:
            raise ModelError(f"a text of {len(tokens)} tokens; {config.length + 1} at least")
        if (teacher is None) != (config.distil == 0):
            raise ModelError("distilling needs a teacher and a part of the loss above 0")
        self._model, self._tokens, self.config = model, tokens, config
        self._teacher_params = () if teacher is None else teacher.params
        optimizer = _optimizer(config)
        # This is a copy, since updates are done in place.
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
          ModelError: a loss is not finite, so that no later loss would be finite either.
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
        """Writes a state for `restore`, and keeps the state before it.

        The state is complete when its sums are written. A run that is killed earlier continues
        from the state before.
        """
        with _manager(folder) as manager:
            if self.step in manager.all_steps():  # a state without sums
                manager.delete(self.step)
            manager.save(self.step, args=ocp.args.StandardSave(self._leaves()))
        text = json.dumps({"step": self.step, "files": sums_of(folder / str(self.step))})
        write_whole(folder / SUMS, text)

    def restore(self, folder: Path) -> bool:
        """Continues from the last state in a folder. Returns whether there is one.

        Raises:
          ModelError: the state is damaged, or belongs to another model or run.
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
    # The manager needs the handler to tell what is stored before it reads it.
    handler = ocp.StandardCheckpointHandler()
    return ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handler)


def _checked_step(folder: Path) -> int:
    """Returns the step of the last state, after a check that its files are as they were written.

    This is done before Orbax reads a file: if one read fails, it leaves other reads unfinished.
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
    """Returns `[batch, length + 1]` int32, sequences that start anywhere in the text."""
    rng = np.random.default_rng((config.seed, step))
    starts = rng.integers(0, len(tokens) - config.length, config.batch)
    return tokens[starts[:, None] + np.arange(config.length + 1)].astype(np.int32)


def mean_loss(
    model: FlaxDecodeModel, tokens: np.ndarray, *, batch: int = 16, length: int = 128
) -> float:
    """Returns the mean loss of a text in nats per token, over its consecutive whole sequences."""
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
