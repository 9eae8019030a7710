"""Sliding window: each query sees the most recent tokens alone. The baseline of `streaming_llm`."""

from dataclasses import replace

from jaxkv.cache import LayerSpec

NAME = "sliding_window"
SINKS = 0


def windowed(layer: LayerSpec, num_tokens: int, sink_tokens: int = SINKS) -> LayerSpec:
    """A layer that keeps `num_tokens` tokens, `sink_tokens` at the beginning among them.

    A layer that has a window stays as it is: what it keeps is bounded.
    """
    if layer.window is not None:
        return layer
    return replace(layer, window=num_tokens - sink_tokens, sink_tokens=sink_tokens)
