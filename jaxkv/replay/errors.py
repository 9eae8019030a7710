"""The exceptions that a user of the simulators meets."""

from jaxkv.errors import JaxkvError


class ReplayError(JaxkvError):
    """A trace or a setting that cannot be replayed; the message is one line."""


class NothingFits(ReplayError):
    """An allocator can serve none of the requests; another allocator may serve them."""
