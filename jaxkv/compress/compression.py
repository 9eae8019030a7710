"""Which method drops tokens, how many are kept and when, as one checked value."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxkv.cache import KVFormat, LayerSpec
from jaxkv.cache.formats import StaticFormat
from jaxkv.compress.budget import Budget
from jaxkv.compress.method import ScoreMethod, check_integer
from jaxkv.compress.methods import METHODS, Method, method_name
from jaxkv.compress.windows import Window


@dataclass(frozen=True, init=False)
class Compression:
    """How an engine drops tokens.

    Two kinds of methods exist. A *window* (`SlidingWindow`, `StreamingLLM`) drops each token when
    it leaves the window. A *score method* drops tokens of a whole context: once, when the context
    is computed, or again after every `interval` further tokens.

    Two values are equal if method, parameters, budget and interval are; only equal ones share pages
    of shortened sequences.

    Attributes:
      method: the method with its parameters.
      budget: tokens that each KV head keeps; for a window, the number of tokens that it holds.
      interval: a score method drops tokens again after this many further tokens; None for once.

    Example:
      `Compression(method="snapkv", budget="50%")`
      `Compression(method=SnapKV(window=32), budget=256, interval=64)`
    """

    method: Method
    budget: Budget
    interval: int | None

    def __init__(
        self,
        *,
        method: Method | str,
        budget: Budget | Fraction | int | float | str,
        interval: int | None = None,
    ):
        """Takes a method or the name that METHODS has for it, and what `Budget` takes.

        Raises:
          ValueError: a field has no valid value, or the method does not take the budget or the
            interval. The message names the field.
        """
        object.__setattr__(self, "method", _find(method) if isinstance(method, str) else method)
        object.__setattr__(self, "budget", budget if isinstance(budget, Budget) else Budget(budget))
        object.__setattr__(self, "interval", interval)
        _check_method(self.method)
        if interval is not None:
            check_integer("interval", interval)
        if isinstance(self.method, Window):
            self._check_window(self.method)

    def _check_window(self, window: Window) -> None:
        if self.budget.is_part:
            raise ValueError(
                f"{self.method_name} takes a number of tokens, not a part ({self.budget})"
            )
        if self.budget.keep(1 << 30) <= window.sink_tokens:
            raise ValueError(
                f"{self.method_name} keeps {window.sink_tokens} first tokens: a budget of "
                f"{self.budget} leaves no window"
            )
        if self.interval is not None:
            raise ValueError(f"{self.method_name} drops tokens all the time: it takes no interval")

    def __str__(self) -> str:
        interval = "" if self.interval is None else f", interval {self.interval}"
        return f"{self.method_name}, budget {self.budget}{interval}"

    @property
    def method_name(self) -> str:
        """Name of the method in messages and reports."""
        return method_name(self.method)

    @property
    def is_window(self) -> bool:
        """The method is a window: it scores no tokens."""
        return isinstance(self.method, Window)

    def score_method(self) -> ScoreMethod:
        """Returns the method, which must not be a window."""
        if isinstance(self.method, Window):
            raise TypeError(f"{self.method_name} is a window: it scores no tokens")
        return self.method

    def layers(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """Returns what each layer of a model keeps with this method."""
        if not isinstance(self.method, Window):
            return tuple(layers)
        num_tokens = self.budget.keep(1 << 30)
        return tuple(self.method.windowed(layer, num_tokens) for layer in layers)

    @property
    def lookback(self) -> int:
        """Number of last tokens whose queries are computed again; 0 for none or for all tokens."""
        return 0 if isinstance(self.method, Window) else self.method.num_queries or 0

    @property
    def splits_heads(self) -> bool:
        """KV heads or layers keep different numbers of tokens, in pages of their own."""
        return not isinstance(self.method, Window) and self.method.uneven

    def check(self, layers: Sequence[LayerSpec], formats: Sequence[KVFormat]) -> None:
        """Checks that the method goes with a model and its KV formats.

        Args:
          layers: the layers of the model.
          formats: the format of each layer.

        Raises:
          ValueError: it does not; the message names the pair.
        """
        name = self.method_name
        dropping = [f for layer, f in zip(layers, formats, strict=True) if layer.window is None]
        if not dropping:
            raise ValueError(f"{name}: every layer of the model already has a window")
        observes_all = not self.is_window and self.score_method().num_queries is None
        if observes_all and len(dropping) < len(layers):
            raise ValueError(
                f"{name} does not go with layers that have a window: it observes the queries of "
                "all tokens, and these layers no longer hold what such queries attend to"
            )
        for kv_format in dropping:
            if kv_format.exact is not None:
                raise ValueError(
                    f"{name} does not go with format {kv_format.name}, which quantises whole pages "
                    "and cannot drop single tokens"
                )
            if self.splits_heads and isinstance(kv_format, StaticFormat):
                raise ValueError(
                    f"{name} does not go with format {kv_format.name}, whose scales are those of "
                    "all KV heads, while each page would hold one head"
                )


def kept_layers(
    compression: Compression | None, layers: tuple[LayerSpec, ...], formats: Sequence[KVFormat]
) -> tuple[tuple[LayerSpec, ...], bool]:
    """Returns what each layer of a model keeps, and whether KV heads have pages of their own.

    Raises:
      ValueError: see `Compression.check`.
    """
    if compression is None:
        return layers, False
    compression.check(layers, formats)
    return compression.layers(layers), compression.splits_heads


def _find(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"no method {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name]


def _check_method(method: object) -> None:
    if not isinstance(method, Method):
        raise ValueError(f"method must be a name, a window or a score method, got {method!r}")
    try:
        hash(method)
    except TypeError as error:
        raise ValueError(
            f"method {method!r} must be a frozen dataclass with hashable fields: {error}"
        ) from None
