"""The exceptions a user of the simulators meets."""

from jaxkv.errors import JaxkvError


class ReplayError(JaxkvError):
    """A trace or a setting that cannot be replayed; the message is one line."""


class NothingFits(ReplayError):
    """No request of all can be served by an allocator; another one may serve them."""
