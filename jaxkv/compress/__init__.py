"""Compression of a KV cache by dropping tokens.

`Compression` is the one value that an engine takes: a method, a budget, and when to drop. Each
method is a small frozen class with the parameters of its paper; `jaxkv.compress.method` shows how
to write your own.

The words: a method *observes* queries and takes *statistics* of them, gives each token a *score*,
and *keeps* the tokens with the best scores, as many as the *budget* says. The other tokens are
*dropped*: their K and V leave the cache, and pages become free. *Protected* tokens are never
dropped. A sequence that has dropped tokens is *shortened*; a *snapshot* is a shortened context that
other requests may share.

The names below are the public ones. The parts that the engine and the evaluation call are in the
submodules `compressor` (the compiled functions of a method) and `kept` (which tokens are kept).
"""

from jaxkv.compress.adakv import AdaKV as AdaKV
from jaxkv.compress.budget import Budget as Budget
from jaxkv.compress.compression import Compression as Compression
from jaxkv.compress.expected_attention import ExpectedAttention as ExpectedAttention
from jaxkv.compress.h2o import H2O as H2O
from jaxkv.compress.inputs import LayerTokens as LayerTokens
from jaxkv.compress.inputs import Queries as Queries
from jaxkv.compress.keydiff import KeyDiff as KeyDiff
from jaxkv.compress.knorm import Knorm as Knorm
from jaxkv.compress.method import FORCED as FORCED
from jaxkv.compress.method import PerSlot as PerSlot
from jaxkv.compress.method import ScoreMethod as ScoreMethod
from jaxkv.compress.methods import METHODS as METHODS
from jaxkv.compress.pyramidkv import PyramidKV as PyramidKV
from jaxkv.compress.random_scores import Random as Random
from jaxkv.compress.snapkv import SnapKV as SnapKV
from jaxkv.compress.tova import TOVA as TOVA
from jaxkv.compress.windows import SlidingWindow as SlidingWindow
from jaxkv.compress.windows import StreamingLLM as StreamingLLM
from jaxkv.compress.windows import Window as Window
