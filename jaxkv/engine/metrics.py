"""Counters of what an engine has done so far."""

from dataclasses import dataclass
from typing import NamedTuple


class PoolState(NamedTuple):
    """The pages of one layer group by state. They sum to the pool's capacity.

    Attributes:
      free: in no sequence and not in the index.
      cached: in the index only.
      held: in use by a sequence or a pin.
    """

    free: int
    cached: int
    held: int


@dataclass
class EngineMetrics:
    """Counters since the engine was made.

    A step that computes several tokens of some sequence counts as prefill, all others as decode.

    Attributes:
      prefill_tokens, decode_tokens: query tokens computed in steps of each kind.
      prefill_seconds, decode_seconds: wall time of those steps, compilation included.
      host_seconds: the part of that time in which the device had nothing to do.
      num_steps: steps run.
      prompt_tokens: tokens of the requests that were started.
      cached_tokens: how many of those were in the prefix cache.
      generated_tokens: tokens drawn.
      copied_pages: pages copied before a sequence wrote to them, in all layer groups.
      evicted_pages: pages that the index removed, evicted or replaced by a fuller one.
      num_preemptions: how often a sequence gave up its pages and started again.
      peak_kv_bytes: largest number of bytes of pages held at once.
      step_shapes: shapes of steps that were run, each compiled once.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0
    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    copied_pages: int = 0
    evicted_pages: int = 0
    num_preemptions: int = 0
    peak_kv_bytes: int = 0
    step_shapes: int = 0

    def add_start(self, num_tokens: int, num_cached: int) -> None:
        """Counts a request that starts for the first time."""
        self.prompt_tokens += num_tokens
        self.cached_tokens += num_cached

    @property
    def hit_rate(self) -> float:
        """Share of the started requests' tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add_step(self, num_tokens: int, seconds: float, *, is_prefill: bool) -> None:
        """Counts a step."""
        self.num_steps += 1
        if is_prefill:
            self.prefill_tokens += num_tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += num_tokens
            self.decode_seconds += seconds
