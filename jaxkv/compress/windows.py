"""Methods that keep a window of recent tokens: a property of layers, not a score of tokens.

A token that has left the window is never read again, and its page is freed while the sequence runs.
"""

from dataclasses import dataclass, field, replace

from jaxkv.cache import LayerSpec
from jaxkv.compress.method import check_integer


@dataclass(frozen=True)
class Window:
    """Base class of the methods that keep a window.

    Attributes:
      sink_tokens: first tokens of the sequence that are kept as well.
    """

    sink_tokens: int

    def __post_init__(self) -> None:
        check_integer("sink_tokens", self.sink_tokens, least=0)

    def windowed(self, layer: LayerSpec, num_tokens: int) -> LayerSpec:
        """Returns a layer that keeps `num_tokens` tokens, the first `sink_tokens` included. A layer
        with a window of its own is returned unchanged, since what it keeps is bounded."""
        if layer.window is not None:
            return layer
        return replace(layer, window=num_tokens - self.sink_tokens, sink_tokens=self.sink_tokens)


@dataclass(frozen=True)
class SlidingWindow(Window):
    """Keeps only the most recent tokens. It is the baseline of `StreamingLLM`.

    A model that was trained without a window loses most of its quality as soon as the first tokens
    leave it; see `StreamingLLM` for the reason.

    Example:
      `Compression(method=SlidingWindow(), budget=1024)`
    """

    sink_tokens: int = field(default=0, init=False, repr=False)


@dataclass(frozen=True)
class StreamingLLM(Window):
    """Keeps the first tokens and the most recent ones (Xiao et al., arXiv 2309.17453).

    Softmax weights must sum to 1, so a head with nothing to look for puts its weight on some token
    that every query can see. Trained models use the first tokens for that: they are *attention
    sinks*. Without them a window's output is unlike anything the model saw in training. With them
    memory and time per token stay constant on a stream of any length.

    As in section 3.2 of the paper, positions count tokens of the cache, not of the text: the sinks
    are seen as if no token stood between them and the window, so a stream may be longer than the
    longest text of the training. No key is rewritten for that; the query is rotated once more
    (`KVCache.sink_position`).

    Attributes:
      sink_tokens: first tokens that are kept, 0 to 8; part of the budget.

    Example:
      `Compression(method=StreamingLLM(sink_tokens=4), budget=1024)` keeps tokens 0 to 3 and the
      last 1020.
    """

    sink_tokens: int = 4
