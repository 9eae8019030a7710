"""Attention over the cache: the one place that knows both its pages and the kernels.

`StepInputs` says which tokens of which sequences a step computes. The slot that the K and V of each
token go to follows from the page tables, on the device. A model projects and rotates, and calls
`update_and_attend` once per layer.
"""

from jaxkv.attention.api import attend as attend
from jaxkv.attention.api import update_and_attend as update_and_attend
from jaxkv.attention.layer import AttentionBackend as AttentionBackend
from jaxkv.attention.layer import QueryAt as QueryAt
from jaxkv.attention.step import StepInputs as StepInputs
from pallas_kernels import Backend as Backend
from pallas_kernels.attention.api import BACKENDS

BACKEND_NAMES = tuple(sorted(backend.name for backend in BACKENDS))
