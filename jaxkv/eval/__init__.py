"""What compression costs: perplexity and distance from the full cache, measured on text."""

from jaxkv.eval.quality import Quality as Quality
from jaxkv.eval.quality import Setting as Setting
from jaxkv.eval.quality import kv_ranges as kv_ranges
from jaxkv.eval.quality import measure as measure
