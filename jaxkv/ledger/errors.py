"""The one exception a user of the ledger meets."""

from jaxkv.errors import JaxkvError


class LedgerError(JaxkvError):
    """A model, a format or a size that the ledger cannot take.

    The message is one line and names the key, format or argument at fault.
    """


def check_least(least: float, **numbers: float) -> None:
    """Raises LedgerError where an argument, given by its name, is less than the least there is."""
    for name, value in numbers.items():
        if not value >= least:  # nor NaN
            raise LedgerError(f"{name} = {value} must be at least {least}")
