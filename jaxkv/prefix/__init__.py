"""Host side of the cache: page pools, the prefix index, and page tables. Imports no jax.

PagePool        which pages of a layer group are free, cached or held
PrefixIndex     which tokens are in which pages: radix trees above the pools
PageTables      the rows of running sequences
SlidingIndex    the index where groups have a window; `make_index` chooses
TokenDropper    rows that drop tokens, and their snapshots
Pins            prefixes that are not evicted for some time
EvictionPolicy  the order of eviction; `POLICIES` are those of this package
"""

from jaxkv.prefix.dropper import TokenDropper as TokenDropper
from jaxkv.prefix.events import Event as Event
from jaxkv.prefix.eviction import Evictable as Evictable
from jaxkv.prefix.eviction import EvictionPolicy as EvictionPolicy
from jaxkv.prefix.index import IndexCounters as IndexCounters
from jaxkv.prefix.index import Match as Match
from jaxkv.prefix.index import PrefixIndex as PrefixIndex
from jaxkv.prefix.integrity import check_integrity as check_integrity
from jaxkv.prefix.node import Namespace as Namespace
from jaxkv.prefix.node import common_length as common_length
from jaxkv.prefix.node import pack as pack
from jaxkv.prefix.pins import Pin as Pin
from jaxkv.prefix.pins import Pins as Pins
from jaxkv.prefix.policies import LFU as LFU
from jaxkv.prefix.policies import LRU as LRU
from jaxkv.prefix.policies import POLICIES as POLICIES
from jaxkv.prefix.policies import Ranked as Ranked
from jaxkv.prefix.pool import OutOfPages as OutOfPages
from jaxkv.prefix.pool import PagePool as PagePool
from jaxkv.prefix.sliding import SlidingIndex as SlidingIndex
from jaxkv.prefix.sliding import SparsePool as SparsePool
from jaxkv.prefix.sliding import make_index as make_index
from jaxkv.prefix.sliding import make_pool as make_pool
from jaxkv.prefix.snapshots import Snapshot as Snapshot
from jaxkv.prefix.snapshots import SnapshotKey as SnapshotKey
from jaxkv.prefix.snapshots import Snapshots as Snapshots
from jaxkv.prefix.tables import PageTables as PageTables
