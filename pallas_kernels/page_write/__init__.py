"""Writing K and V into pages, and copying whole pages."""

from pallas_kernels.page_write.api import copy_pages as copy_pages
from pallas_kernels.page_write.api import write_pages as write_pages
