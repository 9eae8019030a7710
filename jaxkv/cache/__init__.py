"""Device state of the paged cache: its static spec, its pytree, and pure functions over it."""

from jaxkv.cache.choice import check_choice as check_choice
from jaxkv.cache.choice import choose_formats as choose_formats
from jaxkv.cache.choice import format_id as format_id
from jaxkv.cache.export import ExportedPages as ExportedPages
from jaxkv.cache.export import export_pages as export_pages
from jaxkv.cache.export import import_pages as import_pages
from jaxkv.cache.formats import KVFormat as KVFormat
from jaxkv.cache.formats import get_format as get_format
from jaxkv.cache.platform import preferred_layout as preferred_layout
from jaxkv.cache.ranges import KVRanges as KVRanges
from jaxkv.cache.rotation import rotate as rotate
from jaxkv.cache.spec import CacheSpec as CacheSpec
from jaxkv.cache.spec import LayerGroup as LayerGroup
from jaxkv.cache.spec import LayerPages as LayerPages
from jaxkv.cache.spec import LayerSpec as LayerSpec
from jaxkv.cache.state import KVCache as KVCache
from jaxkv.cache.state import copy_pages as copy_pages
from jaxkv.cache.state import gather_dense as gather_dense
from jaxkv.cache.state import init_cache as init_cache
from jaxkv.cache.state import move_tokens as move_tokens
from jaxkv.cache.state import seal as seal
from jaxkv.cache.state import write as write
