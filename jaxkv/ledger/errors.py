"""What the ledger raises. A KV format that does not exist is a UsageError of `jaxkv.kv_format`."""

from jaxkv.errors import JaxkvError


class LedgerError(JaxkvError):
    """A model or a size that the ledger cannot take.

    The message is one line and names the key or argument at fault.
    """


def check_least(least: float, **numbers: float) -> None:
    """Raises LedgerError if an argument, given by its name, is smaller than `least` or NaN."""
    for name, value in numbers.items():
        if not value >= least:
            raise LedgerError(f"{name} = {value} must be at least {least}")
