"""Simulators: what allocators waste and what prefix caches save, on workloads and real traces.

Requests are replayed over the page pool and the prefix index of the engine. No model runs, and no
JAX is needed.
"""

from jaxkv.replay import workloads as workloads
from jaxkv.replay.caches import CACHES as CACHES
from jaxkv.replay.caches import EVICTIONS as EVICTIONS
from jaxkv.replay.errors import NothingFits as NothingFits
from jaxkv.replay.errors import ReplayError as ReplayError
from jaxkv.replay.fragmentation import Fragmentation as Fragmentation
from jaxkv.replay.fragmentation import measure_fragmentation as measure_fragmentation
from jaxkv.replay.lengths import DISTRIBUTIONS as DISTRIBUTIONS
from jaxkv.replay.lengths import draw_requests as draw_requests
from jaxkv.replay.reuse import OPTIMUM as OPTIMUM
from jaxkv.replay.reuse import Reuse as Reuse
from jaxkv.replay.reuse import Turn as Turn
from jaxkv.replay.reuse import check_reusable as check_reusable
from jaxkv.replay.reuse import measure_reuse as measure_reuse
from jaxkv.replay.reuse import pack_requests as pack_requests
from jaxkv.replay.reuse import turns as turns
from jaxkv.replay.stores import ALLOCATORS as ALLOCATORS
from jaxkv.replay.traces import Expanded as Expanded
from jaxkv.replay.traces import TraceRequest as TraceRequest
from jaxkv.replay.traces import read_trace as read_trace
