"""Ragged paged attention for NVIDIA Hopper GPUs; the docstring of `call` says how it works."""

from pallas_kernels.attention.mosaic_gpu.call import block_tokens as block_tokens
from pallas_kernels.attention.mosaic_gpu.call import (
    ragged_paged_attention as ragged_paged_attention,
)
from pallas_kernels.attention.mosaic_gpu.call import refusal as refusal
