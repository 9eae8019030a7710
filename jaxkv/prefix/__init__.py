"""Host side of the cache: page pools and sequences' page tables. Imports no jax."""

from jaxkv.prefix.pages import SequencePages as SequencePages
from jaxkv.prefix.pool import OutOfPages as OutOfPages
from jaxkv.prefix.pool import PagePool as PagePool
