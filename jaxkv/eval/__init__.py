"""Measures what compression costs on text: perplexity, distance from the full cache, and tasks."""

from jaxkv.eval.harness import HarnessModel as HarnessModel
from jaxkv.eval.paged_text import PagedText as PagedText
from jaxkv.eval.paged_text import Reading as Reading
from jaxkv.eval.paged_text import Setting as Setting
from jaxkv.eval.paged_text import TextFunctions as TextFunctions
from jaxkv.eval.paged_text import kv_ranges as kv_ranges
from jaxkv.eval.paged_text import read as read
from jaxkv.eval.quality import Comparison as Comparison
from jaxkv.eval.quality import Quality as Quality
from jaxkv.eval.quality import measure as measure
