"""Writing K and V into pages, sealing full pages, and copying whole ones."""

from pallas_kernels.page_write.api import copy_pages as copy_pages
from pallas_kernels.page_write.api import seal_pages as seal_pages
from pallas_kernels.page_write.api import write_pages as write_pages
