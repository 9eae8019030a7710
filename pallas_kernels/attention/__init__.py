"""Attention of ragged queries over paged keys and values."""

from pallas_kernels.attention.api import ragged_paged_attention as ragged_paged_attention
from pallas_kernels.attention.options import KeyPart as KeyPart
from pallas_kernels.attention.ragged import SharedPrefixes as SharedPrefixes
