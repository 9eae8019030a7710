"""The methods by the names that command lines and configurations use."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxkv.compress.adakv import AdaKV
from jaxkv.compress.expected_attention import ExpectedAttention
from jaxkv.compress.h2o import H2O
from jaxkv.compress.keydiff import KeyDiff
from jaxkv.compress.knorm import Knorm
from jaxkv.compress.method import ScoreMethod
from jaxkv.compress.pyramidkv import PyramidKV
from jaxkv.compress.random_scores import Random
from jaxkv.compress.snapkv import SnapKV
from jaxkv.compress.tova import TOVA
from jaxkv.compress.windows import SlidingWindow, StreamingLLM, Window

Method = Window | ScoreMethod

_WINDOWS: dict[str, Method] = {"sliding_window": SlidingWindow(), "streaming_llm": StreamingLLM()}
_SCORES: dict[str, ScoreMethod] = {
    "random": Random(),
    "knorm": Knorm(),
    "keydiff": KeyDiff(),
    "expected_attention": ExpectedAttention(),
    "tova": TOVA(),
    "snapkv": SnapKV(),
    "pyramidkv": PyramidKV(),
    "h2o": H2O(),
}
# All heads have the same scores under TOVA: sharing a budget among them would change nothing.
_SHARED = {f"adakv_{name}": AdaKV(_SCORES[name]) for name in _SCORES if name != "tova"}
# Each name's method, with the default values of its parameters.
METHODS: Mapping[str, Method] = MappingProxyType(_WINDOWS | _SCORES | _SHARED)


def method_name(method: Method) -> str:
    """Returns the name that METHODS has for a method, or the call that makes it, such as
    `SnapKV(window=32, kernel_size=5)`."""
    return next((name for name, known in METHODS.items() if known == method), repr(method))
