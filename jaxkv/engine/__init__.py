"""Serving a model: requests in, tokens out, over the paged cache."""

from jaxkv.engine.beam import Beam as Beam
from jaxkv.engine.beam import beam_search as beam_search
from jaxkv.engine.config import EngineConfig as EngineConfig
from jaxkv.engine.engine import Engine as Engine
from jaxkv.engine.metrics import EngineMetrics as EngineMetrics
from jaxkv.engine.metrics import PoolState as PoolState
from jaxkv.engine.request import Completion as Completion
from jaxkv.engine.request import Delta as Delta
from jaxkv.engine.request import FinishReason as FinishReason
from jaxkv.engine.request import Request as Request
from jaxkv.engine.request import RequestError as RequestError
from jaxkv.engine.request import SamplingParams as SamplingParams
from jaxkv.engine.request import TokenLogprob as TokenLogprob
from jaxkv.engine.sizing import Footprint as Footprint
from jaxkv.engine.sizing import footprint as footprint
