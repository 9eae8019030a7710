"""Which method drops tokens, how many it keeps and when, as one checked value.

Two kinds of methods exist. A *window* (`sliding_window`, `streaming_llm`) is a property of layers:
tokens behind it are never seen again, and their pages go back while a sequence runs. A *score*
method drops tokens of a sequence that is there: once, when its prompt is computed, or every so many
tokens more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.cache import KVFormat, LayerSpec
from jaxkv.cache.formats import StaticFormat
from jaxkv.compress import sliding_window, streaming_llm
from jaxkv.compress.adakv import AdaKV
from jaxkv.compress.budget import Budget
from jaxkv.compress.expected_attention import ExpectedAttention
from jaxkv.compress.h2o import H2O
from jaxkv.compress.keydiff import KeyDiff
from jaxkv.compress.knorm import Knorm
from jaxkv.compress.method import ScoreMethod
from jaxkv.compress.pyramidkv import PyramidKV
from jaxkv.compress.random_scores import Random
from jaxkv.compress.snapkv import SnapKV
from jaxkv.compress.tova import Tova

WINDOWS = {module.NAME: module.SINKS for module in (sliding_window, streaming_llm)}
SCORES: dict[str, type[ScoreMethod]] = {
    method.name: method
    for method in (Random, Knorm, KeyDiff, ExpectedAttention, Tova, SnapKV, PyramidKV, H2O)
}
ADAKV = "adakv_"
METHODS = (*WINDOWS, *SCORES, *(ADAKV + name for name in SCORES if not SCORES[name].same_tokens))


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Fewer tokens.

    Attributes:
      method: of METHODS.
      budget: tokens that each KV head keeps; for a window, the number that it sees.
      interval: score methods also drop tokens whenever so many more are there; None for once.

    Raises:
      ValueError: there is no such method, or it does not take such a budget or interval.
    """

    method: str
    budget: Budget
    interval: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"no method {self.method!r}; there are {', '.join(METHODS)}")
        if not isinstance(self.budget, Budget):
            raise ValueError(f"budget must be Budget, got {self.budget!r}; Budget.parse reads text")
        if self.interval is not None:
            if not isinstance(self.interval, int) or isinstance(self.interval, bool):
                raise ValueError(f"interval must be int, got {self.interval!r}")
            if self.interval < 1:
                raise ValueError(f"interval must be at least 1, got {self.interval}")
        if self.is_window:
            if self.budget.is_part:
                raise ValueError(
                    f"{self.method} takes a number of tokens, not a part ({self.budget})"
                )
            if self.budget.keep(1 << 30) <= WINDOWS[self.method]:
                raise ValueError(
                    f"{self.method} keeps {WINDOWS[self.method]} first tokens: a budget of "
                    f"{self.budget} leaves no window"
                )
            if self.interval is not None:
                raise ValueError(f"{self.method} drops tokens all the time: it takes no interval")

    @property
    def is_window(self) -> bool:
        """The method is a property of layers, and scores nothing."""
        return self.method in WINDOWS

    @property
    def name(self) -> str:
        """Method, budget and interval, as index namespaces and reports have them."""
        every = "" if self.interval is None else f"/{self.interval}"
        return f"{self.method}:{self.budget}{every}"

    def layers(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """What each layer of a model keeps under this method."""
        if not self.is_window:
            return tuple(layers)
        sizes = self.budget.keep(1 << 30), WINDOWS[self.method]
        return tuple(sliding_window.windowed(layer, *sizes) for layer in layers)

    def score_method(self) -> ScoreMethod:
        """The method that scores; not for a window."""
        if self.method.startswith(ADAKV):
            return AdaKV(SCORES[self.method.removeprefix(ADAKV)]())
        return SCORES[self.method]()

    @property
    def lookback(self) -> int:
        """Of how many last tokens queries are looked at once more, where these are not all."""
        return 0 if self.is_window else self.score_method().num_queries or 0

    @property
    def splits_heads(self) -> bool:
        """KV heads, or layers, keep different numbers of tokens, in pages of their own."""
        if self.is_window:
            return False
        method = self.score_method()
        return method.by_head or method.by_layer

    def check(self, layers: Sequence[LayerSpec], formats: Sequence[KVFormat]) -> None:
        """Raises ValueError, naming the pair, where the method does not go with a model or format.

        Args:
          layers: of the model.
          formats: of its layers.
        """
        chosen = [f for layer, f in zip(layers, formats, strict=True) if layer.window is None]
        if not chosen:
            raise ValueError(f"{self.method}: every layer of the model has a window already")
        looks_at_all = not self.is_window and self.score_method().num_queries is None
        if looks_at_all and len(chosen) < len(layers):
            raise ValueError(
                f"{self.method} does not go with layers that have a window: it looks at queries "
                "of all tokens again, and these layers no longer have what such queries see"
            )
        for kv_format in chosen:
            if kv_format.exact is not None:
                raise ValueError(
                    f"{self.method} does not go with format {kv_format.name}: its codes are those "
                    "of whole pages, which lose tokens"
                )
            if self.splits_heads and isinstance(kv_format, StaticFormat):
                raise ValueError(
                    f"{self.method} does not go with format {kv_format.name}: its pages hold one "
                    "KV head, its scales are those of all"
                )


def kept_layers(
    compression: Compression | None, layers: tuple[LayerSpec, ...], formats: Sequence[KVFormat]
) -> tuple[tuple[LayerSpec, ...], bool]:
    """What each layer of a model keeps, and whether KV heads have pages of their own; without a
    method, the layers as they are.

    Raises:
      ValueError: see `Compression.check`.
    """
    if compression is None:
        return layers, False
    compression.check(layers, formats)
    return compression.layers(layers), compression.splits_heads
