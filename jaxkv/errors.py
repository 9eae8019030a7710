"""The errors that tell a user what to change. Plain Python, so that every package may import it."""


class JaxkvError(ValueError):
    """Something that the caller can correct: an argument, a file, a model, or a request.

    The message is one line. It names what is wrong and, where possible, what to do instead. The
    `jaxkv` command prints it and exits with code 2; any other exception is a bug of jaxkv.
    """


class UsageError(JaxkvError):
    """An option or an input file of a command, or an argument of `jaxkv.LLM`, cannot be used."""
