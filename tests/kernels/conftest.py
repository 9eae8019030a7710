"""Has pytest explain the assertions of the suites as it explains those of the test modules."""

import pytest

pytest.register_assert_rewrite("tests.kernels.attention_suite", "tests.kernels.bits_suite")
