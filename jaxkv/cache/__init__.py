"""Device state of the paged cache: its static spec, its pytree, and pure functions over it."""

from jaxkv.cache.formats import FORMATS as FORMATS
from jaxkv.cache.formats import KVFormat as KVFormat
from jaxkv.cache.formats import get_format as get_format
from jaxkv.cache.invariants import check_cache as check_cache
from jaxkv.cache.invariants import check_tables as check_tables
from jaxkv.cache.spec import CacheSpec as CacheSpec
from jaxkv.cache.spec import LayerGroup as LayerGroup
from jaxkv.cache.spec import LayerSpec as LayerSpec
from jaxkv.cache.spec import group_layers as group_layers
from jaxkv.cache.state import ExportedPages as ExportedPages
from jaxkv.cache.state import KVCache as KVCache
from jaxkv.cache.state import copy_pages as copy_pages
from jaxkv.cache.state import export_pages as export_pages
from jaxkv.cache.state import gather_dense as gather_dense
from jaxkv.cache.state import import_pages as import_pages
from jaxkv.cache.state import init_cache as init_cache
from jaxkv.cache.state import write as write
from pallas_kernels.checks import PAGE_SIZES as PAGE_SIZES
