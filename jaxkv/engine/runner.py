"""The device side of an engine: the cache, and the compiled steps that read and replace it."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from jaxkv.cache import CacheSpec, KVCache, init_cache
from jaxkv.engine.config import EngineConfig
from jaxkv.engine.sampling import SamplingRows
from jaxkv.engine.shapes import ShapeTable, StepShape
from jaxkv.engine.step import StepChoices, StepFunctions, StepResult
from jaxkv.engine.step_arrays import StepLayout, idle_buffer, plan_buffer
from jaxkv.engine.step_plan import PageCopy, StepPlan
from jaxkv.model import DecodeModel
from jaxkv.prefix import PageTables


class StepCall(NamedTuple):
    """The arguments of `StepFunctions.run` besides the cache."""

    buffer: np.ndarray
    seen: jax.Array | np.ndarray
    layout: StepLayout


class StepRunner:
    """Runs plans.

    Attributes:
      cache: the K and V of all pages. Each step replaces it.
      shapes: the shapes that a step may have.
      steps: the compiled functions.
    """

    def __init__(
        self,
        model: DecodeModel,
        config: EngineConfig,
        spec: CacheSpec,
        tables: PageTables,
        steps: StepFunctions | None,
    ):
        """Allocates the cache; compiles nothing yet.

        Args:
          model: the decoder.
          config: sizes and choices.
          spec: what the cache holds.
          tables: the page tables of running sequences.
          steps: compiled functions to use; None makes new ones.

        Raises:
          ValueError: `steps` are those of another model or of other choices.
        """
        choices = StepChoices(config.backend, config.deterministic, config.sampler)
        self.steps = steps or StepFunctions(model, choices)
        self.steps.check(model, choices)
        self.cache: KVCache = init_cache(spec)
        self.shapes = ShapeTable.plan(
            config.max_sequences, config.token_budget, deterministic=config.deterministic
        )
        self._tables = tables
        self._max_sequences = config.max_sequences
        self._sampling = SamplingRows(config.max_sequences, model.vocab_size)
        self._layouts: dict[StepShape, StepLayout] = {}  # of the shapes that were run

    @property
    def num_shapes(self) -> int:
        """Shapes that were run so far, each compiled once."""
        return len(self._layouts)

    def prepare(self, plan: StepPlan) -> StepCall:
        """Copies the pages that a plan names, and makes the arrays of its step."""
        self.copy(plan.copies)
        for sequence in plan.started:
            self._sampling.set(sequence.row, sequence.request.sampling)
        layout = self._layout(self.shapes.fit(plan))
        buffer = plan_buffer(plan, layout, self._tables, self._sampling.controls)
        seen = self._sampling.seen(plan.seen, layout.shape.num_sequences)
        return StepCall(buffer, seen, layout)

    def run(self, call: StepCall) -> StepResult:
        """Starts a step on the device."""
        result, self.cache = self.steps.run(self.cache, *call)
        return result

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copies pages."""
        if copies := list(copies):
            self.cache = self.steps.copy(self.cache, copies, self._max_sequences)

    def warm_up(self) -> None:
        """Runs each shape of step once, and a copy of a page, all on the null page."""
        for shape in self.shapes:
            layout = self._layout(shape)
            buffer = idle_buffer(layout, self._sampling.controls[-1])
            self.run(StepCall(buffer, self._sampling.seen({}, shape.num_sequences), layout))
        self.cache = self.steps.copy(self.cache, (), self._max_sequences)
        jax.block_until_ready(self.cache)

    def _layout(self, shape: StepShape) -> StepLayout:
        if shape not in self._layouts:
            num_groups, max_pages = len(self._tables.pools), self._tables.pages[0].shape[1]
            self._layouts[shape] = StepLayout(
                shape=shape, num_groups=num_groups, max_pages=max_pages
            )
        return self._layouts[shape]
