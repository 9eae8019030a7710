"""Ragged paged attention for TPUs; the docstring of `call` says how it works."""

from pallas_kernels.attention.mosaic_tpu.call import (
    ragged_paged_attention as ragged_paged_attention,
)
from pallas_kernels.attention.mosaic_tpu.call import refusal as refusal
from pallas_kernels.attention.mosaic_tpu.plan import block_tokens as block_tokens
