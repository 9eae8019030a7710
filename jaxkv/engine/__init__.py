"""Serving a model: requests in, tokens out, over the paged cache."""

from jaxkv.engine.beam import Beam as Beam
from jaxkv.engine.beam import beam_search as beam_search
from jaxkv.engine.completion import Completion as Completion
from jaxkv.engine.completion import Delta as Delta
from jaxkv.engine.completion import FinishReason as FinishReason
from jaxkv.engine.completion import TokenLogprob as TokenLogprob
from jaxkv.engine.config import EngineConfig as EngineConfig
from jaxkv.engine.engine import Engine as Engine
from jaxkv.engine.metrics import EngineMetrics as EngineMetrics
from jaxkv.engine.metrics import PoolState as PoolState
from jaxkv.engine.request import Request as Request
from jaxkv.engine.request import RequestError as RequestError
from jaxkv.engine.request import SamplingParams as SamplingParams
from jaxkv.engine.sampling import Sampler as Sampler
from jaxkv.engine.sampling import SamplingInputs as SamplingInputs
from jaxkv.engine.sampling import draw as draw
from jaxkv.engine.sizing import Footprint as Footprint
from jaxkv.engine.sizing import footprint as footprint
from jaxkv.model import DecodeModel as DecodeModel
