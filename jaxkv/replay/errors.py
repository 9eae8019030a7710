"""The one exception a user of the simulators meets."""


class ReplayError(ValueError):
    """A trace or a setting that cannot be replayed; the message is one line."""
