"""The one exception a user of `models` meets: a checkpoint or tokenizer that cannot be used."""

from jaxkv.errors import JaxkvError


class ModelError(JaxkvError):
    """A model file is missing, damaged, or asks for maths that this package does not have.

    The message is one line, names the file and the key at fault, and says what to do; scripts
    print it as it is and exit with code 2.
    """
