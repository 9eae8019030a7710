"""The one exception a user of the ledger meets."""


class LedgerError(ValueError):
    """A model, a format or a size that the ledger cannot take.

    The message is one line and names the key, format or argument at fault.
    """
