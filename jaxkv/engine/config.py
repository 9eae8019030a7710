"""The sizes and choices of one engine."""

from dataclasses import dataclass

from jaxkv.attention import BACKEND_NAMES, Backend
from jaxkv.cache import KVFormat, KVRanges, check_choice
from jaxkv.compress import Compression
from jaxkv.engine.sampling import Sampler, draw
from jaxkv.engine.scheduler import SCHEDULING
from jaxkv.errors import UsageError
from jaxkv.kv_format import PAGE_SIZES
from jaxkv.prefix import POLICIES, EvictionPolicy


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The sizes and choices of one engine.

    With greedy decoding only `kv_format`, `compression`, `sampler` and, for kivi formats (which
    quantise page by page), `page_size` can change the output. `kv_ranges` sets the scales of
    static formats; `max_length` and the size of the pool limit how long an answer can be. All other
    fields affect only speed and memory.

    Example:
      >>> EngineConfig(max_sequences=16, pool_bytes=4 << 30, kv_format="int8")

    Attributes:
      max_sequences: largest number of sequences in one step.
      token_budget: largest number of query tokens in one step. Longer prompts are computed in
        chunks over several steps.
      page_size: tokens per page.
      pool_tokens: tokens that the cache holds. None takes as many as `max_sequences` sequences of
        the greatest length need, but not more than fit in `pool_bytes`.
      pool_bytes: largest size of the cache if `pool_tokens` is None.
      max_length: longest sequence in tokens, prompt and answer. None takes the model's limit.
      kv_format: how K and V are stored: the name of a format of `jaxkv.cache`, or several by layer
        such as `kivi4,window=bf16`, or a format of your own (see `jaxkv.cache.choose_formats`).
      kv_ranges: measured ranges of the model's K and V, for formats with fixed scales.
      compression: which tokens are dropped from the cache, and when. None keeps all.
      deterministic: the logits of a sequence have the same bits whatever else is in the batch,
        however its prompt is cut into chunks and, except for kivi formats, whatever the page size.
        It is slower: small steps are padded, and no step has more than 64 tokens.
      backend: name of the attention backend, or a `jaxkv.attention.Backend` of your own; None takes
        the fastest one of the platform.
      sampler: a pure function that draws the next tokens inside the jitted step, see
        `jaxkv.engine.Sampler`. It is compiled into each step and must compute each row only from
        that row, or a batch could change an answer.
      prefix_cache: keep the pages of finished requests, and share them with later requests that
        begin with the same tokens.
      eviction: which cached page is evicted first: a name from `jaxkv.prefix.POLICIES`, or a policy
        (`jaxkv.prefix.EvictionPolicy`) that serves no other engine.
      scheduling: which waiting request starts first: a name from
        `jaxkv.engine.scheduler.SCHEDULING`.

    Raises:
      UsageError: a value cannot be used; the message names the field.
    """

    max_sequences: int = 8
    token_budget: int = 512
    page_size: int = 16
    pool_tokens: int | None = None
    pool_bytes: int = 1 << 30
    max_length: int | None = None
    kv_format: str | KVFormat = "f32"
    kv_ranges: KVRanges | None = None
    compression: Compression | None = None
    deterministic: bool = False
    backend: str | Backend | None = None
    sampler: Sampler = draw
    prefix_cache: bool = True
    eviction: str | EvictionPolicy = "lru"
    scheduling: str = "lpm"

    def __post_init__(self) -> None:
        for name, expected in _TYPES.items():
            if not isinstance(getattr(self, name), expected):
                wanted = getattr(expected, "__name__", str(expected))
                raise UsageError(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        for name in ("max_sequences", "token_budget", "pool_bytes"):
            _check_count(name, getattr(self, name))
        for name in ("pool_tokens", "max_length"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if type(self.page_size) is not int or self.page_size not in PAGE_SIZES:
            raise UsageError(
                f"page_size must be {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}, got {self.page_size}"
            )
        if not isinstance(self.backend, Backend) and self.backend not in (None, *BACKEND_NAMES):
            raise UsageError(
                f"backend must be None, a Backend or of {BACKEND_NAMES}, got {self.backend!r}"
            )
        if not callable(self.sampler):
            raise UsageError(f"sampler must be a function, got {self.sampler!r}")
        is_policy = isinstance(self.eviction, EvictionPolicy) and not isinstance(
            self.eviction, type
        )
        if self.eviction not in tuple(POLICIES) and not is_policy:
            raise UsageError(
                f"eviction must be of {tuple(POLICIES)} or a policy, got {self.eviction!r}"
            )
        if self.scheduling not in SCHEDULING:
            raise UsageError(f"scheduling must be of {SCHEDULING}, got {self.scheduling!r}")
        check_choice(self.kv_format)


_TYPES = {
    "kv_format": str | KVFormat,
    "kv_ranges": KVRanges | None,
    "compression": Compression | None,
    "deterministic": bool,
    "prefix_cache": bool,
}


def _check_count(name: str, value: object) -> None:
    """Raises UsageError unless a value is a positive integer that int32 slot numbers can express
    (bytes may be more)."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{name} must be int, got {value!r}")
    largest = 1 << (60 if name == "pool_bytes" else 30)
    if not 1 <= value <= largest:
        raise UsageError(f"{name} must be at least 1 and at most {largest}, got {value}")
