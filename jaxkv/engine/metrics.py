"""What an engine has done so far, counted on the host."""

from dataclasses import dataclass
from typing import NamedTuple


class PoolState(NamedTuple):
    """Pages of one layer group by what they are; they add up to the capacity."""

    free: int
    cached: int
    held: int


@dataclass
class EngineMetrics:
    """Counters since the engine was made.

    A step that computes a chunk of any prompt counts as prefill, whole; others as decode.

    Attributes:
      prefill_tokens, decode_tokens: query tokens computed in steps of either kind.
      prefill_seconds, decode_seconds: wall time of those steps, compilation included.
      host_seconds: the part of them in which the device had nothing to do.
      num_steps: steps run.
      prompt_tokens, cached_tokens: tokens of the requests that were started, and those of them
        whose K and V were cached.
      generated_tokens: tokens drawn.
      copied_pages: pages copied on write, in all layer groups.
      evicted_pages: pages that the index let go: evicted, or outgrown by a fuller one.
      num_preemptions: how often a sequence gave up its pages and started again.
      peak_kv_bytes: most bytes of pages held at once.
      step_shapes: shapes that were run, each compiled once.
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

    @property
    def hit_rate(self) -> float:
        """Share of the started requests' tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add_step(self, num_tokens: int, seconds: float, *, is_prefill: bool) -> None:
        """Books one step."""
        self.num_steps += 1
        if is_prefill:
            self.prefill_tokens += num_tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += num_tokens
            self.decode_seconds += seconds
