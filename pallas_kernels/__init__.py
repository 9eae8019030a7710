"""Kernels for paged attention: arrays in, arrays out, usable without the rest of jaxkv."""

from pallas_kernels.attention import ragged_paged_attention as ragged_paged_attention
from pallas_kernels.online_softmax import merge_partials as merge_partials
from pallas_kernels.page_write import copy_pages as copy_pages
from pallas_kernels.page_write import write_pages as write_pages
from pallas_kernels.pages import Layout as Layout
from pallas_kernels.pages import Pages as Pages
