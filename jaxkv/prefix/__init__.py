"""Host side of the cache: page pools, the prefix index, sequences' page tables. Imports no jax."""

from jaxkv.prefix.events import Event as Event
from jaxkv.prefix.index import IndexCounters as IndexCounters
from jaxkv.prefix.index import Match as Match
from jaxkv.prefix.index import PrefixIndex as PrefixIndex
from jaxkv.prefix.integrity import check_integrity as check_integrity
from jaxkv.prefix.node import Namespace as Namespace
from jaxkv.prefix.node import common_length as common_length
from jaxkv.prefix.node import pack as pack
from jaxkv.prefix.pins import Pin as Pin
from jaxkv.prefix.pins import Pins as Pins
from jaxkv.prefix.policies import POLICIES as POLICIES
from jaxkv.prefix.policies import EvictionPolicy as EvictionPolicy
from jaxkv.prefix.pool import OutOfPages as OutOfPages
from jaxkv.prefix.pool import PagePool as PagePool
from jaxkv.prefix.shortened import ShortenedTables as ShortenedTables
from jaxkv.prefix.snapshots import Snapshot as Snapshot
from jaxkv.prefix.snapshots import SnapshotKey as SnapshotKey
from jaxkv.prefix.tables import PageTables as PageTables
