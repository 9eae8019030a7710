"""Kernels for paged attention: arrays in, arrays out, usable without the rest of jaxkv."""

from pallas_kernels.attention import KeyPart as KeyPart
from pallas_kernels.attention import SharedPrefixes as SharedPrefixes
from pallas_kernels.attention import ragged_paged_attention as ragged_paged_attention
from pallas_kernels.dispatch import Backend as Backend
from pallas_kernels.online_softmax import merge_partials as merge_partials
from pallas_kernels.page_write import copy_pages as copy_pages
from pallas_kernels.page_write import seal_pages as seal_pages
from pallas_kernels.page_write import write_pages as write_pages
from pallas_kernels.pages import Layout as Layout
from pallas_kernels.pages import Pages as Pages
from pallas_kernels.quantised_pages import AffinePages as AffinePages
from pallas_kernels.quantised_pages import AnyPages as AnyPages
from pallas_kernels.quantised_pages import ChannelPages as ChannelPages
from pallas_kernels.quantised_pages import SymmetricPages as SymmetricPages
from pallas_kernels.quantised_pages import TokenPages as TokenPages
