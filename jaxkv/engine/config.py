"""How an engine is sized and run."""

from dataclasses import dataclass

from jaxkv.attention import BACKEND_NAMES, Backend
from jaxkv.cache import PAGE_SIZES, KVRanges, check_choice
from jaxkv.compress import Compression
from jaxkv.engine.waiting import SCHEDULING
from jaxkv.prefix import POLICIES


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and choices of one engine. None changes a greedy token but `kv_format` and
    `compression`, and under kivi formats, whose codes go by pages, `page_size`.

    Attributes:
      max_sequences: most sequences in a step.
      token_budget: most query tokens in a step; longer prompts are computed in chunks.
      page_size: P, tokens a page.
      pool_tokens: tokens that the cache holds in all; None takes what all sequences at their
        longest could need, but at most `pool_bytes`.
      pool_bytes: see `pool_tokens`.
      max_length: longest sequence, prompt and answer; None takes the model's.
      kv_format: how K and V are stored: a format of `jaxkv.cache`, and others for some layers, as
        `kivi4,window=bf16` (`jaxkv.cache.choose_formats`).
      kv_ranges: of the model's K and V, for formats whose scales are measured beforehand.
      compression: which tokens of a sequence are dropped, and when; None keeps all.
      deterministic: a sequence's logits have the same bits whatever else is in the batch, however
        its prompt is cut into chunks, and, kivi formats aside, whatever the page size. Slower:
        small steps are padded, and no step has more than 64 tokens.
      backend: name of an attention backend, a `Backend` of your own, or None for the platform's
        best.
      prefix_cache: keep pages of requests that have ended, and share them with later ones that
        begin with the same tokens.
      eviction: which cached page goes first, a name of `jaxkv.prefix.POLICIES`.
      scheduling: which waiting request goes first, of `jaxkv.engine.waiting.SCHEDULING`.
    """

    max_sequences: int = 8
    token_budget: int = 512
    page_size: int = 16
    pool_tokens: int | None = None
    pool_bytes: int = 1 << 30
    max_length: int | None = None
    kv_format: str = "f32"
    kv_ranges: KVRanges | None = None
    compression: Compression | None = None
    deterministic: bool = False
    backend: str | Backend | None = None
    prefix_cache: bool = True
    eviction: str = "lru"
    scheduling: str = "lpm"

    def check(self) -> None:
        """Raises ValueError, naming the field, where a value cannot be used."""
        for name, expected in _TYPES.items():
            if not isinstance(getattr(self, name), expected):
                wanted = getattr(expected, "__name__", str(expected))
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        for name in ("max_sequences", "token_budget", "pool_bytes"):
            _check_count(name, getattr(self, name))
        for name in ("pool_tokens", "max_length"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if type(self.page_size) is not int or self.page_size not in PAGE_SIZES:
            raise ValueError(
                f"page_size must be {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}, got {self.page_size}"
            )
        if not isinstance(self.backend, Backend) and self.backend not in (None, *BACKEND_NAMES):
            raise ValueError(
                f"backend must be None, a Backend or of {BACKEND_NAMES}, got {self.backend!r}"
            )
        for name, known in (("eviction", tuple(POLICIES)), ("scheduling", SCHEDULING)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be of {known}, got {getattr(self, name)!r}")
        check_choice(self.kv_format)


_TYPES = {
    "kv_format": str,
    "kv_ranges": KVRanges | None,
    "compression": Compression | None,
    "deterministic": bool,
    "prefix_cache": bool,
}


def _check_count(name: str, value: object) -> None:
    """Raises ValueError unless a value is a number of things, at most what int32 slots can tell."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be int, got {value!r}")
    largest = 1 << (60 if name == "pool_bytes" else 30)
    if not 1 <= value <= largest:
        raise ValueError(f"{name} must be at least 1 and at most {largest}, got {value}")
