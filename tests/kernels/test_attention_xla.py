"""The XLA backend: the suites of values and of bits."""

from typing import ClassVar

from jaxkv.testing.bits_suite import BitsSuite


class TestXla(BitsSuite):
    backend = "xla"
    row_options: ClassVar = {"query_tile": 64}
