"""Text that is safe to show in one line of a terminal, whatever file or user it came from."""

WIDTH = 80  # characters of a value that a message quotes


def printable(text: str) -> str:
    """Returns the text with line ends and characters that a terminal would obey escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str) -> str:
    """Returns a printable text of at most WIDTH characters; an ellipsis marks a cut."""
    text = printable(text)
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
