"""Fewer tokens: methods that drop some of a sequence's tokens from the cache, a file each."""

from jaxkv.compress.budget import Budget as Budget
from jaxkv.compress.choice import METHODS as METHODS
from jaxkv.compress.choice import SCORES as SCORES
from jaxkv.compress.choice import WINDOWS as WINDOWS
from jaxkv.compress.choice import Compression as Compression
from jaxkv.compress.choice import kept_layers as kept_layers
from jaxkv.compress.compressor import MAX_SPANS as MAX_SPANS
from jaxkv.compress.compressor import Compressor as Compressor
from jaxkv.compress.compressor import Kept as Kept
from jaxkv.compress.compressor import Row as Row
from jaxkv.compress.compressor import num_protected as num_protected
from jaxkv.compress.method import ScoreMethod as ScoreMethod
