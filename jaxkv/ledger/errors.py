"""The one exception that a user of the ledger meets."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxkv.errors import JaxkvError


class LedgerError(JaxkvError):
    """A model, a format or a size that the ledger cannot take.

    The message is one line and names the key, format or argument at fault.
    """


@contextmanager
def as_ledger_error() -> Iterator[None]:
    """Raises a ValueError of `jaxkv.kv_format` as a LedgerError."""
    try:
        yield
    except ValueError as error:
        raise LedgerError(str(error)) from None


def check_least(least: float, **numbers: float) -> None:
    """Raises LedgerError if an argument, given by its name, is smaller than `least` or NaN."""
    for name, value in numbers.items():
        if not value >= least:
            raise LedgerError(f"{name} = {value} must be at least {least}")
