"""Short forms of the messages of errors and other programs."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: Exception) -> str:
    """Return the whole message of an error in one line, or its class."""
    return " ".join(str(error).split()) or type(error).__name__


def last_lines(text: str) -> str:
    """Return the last three non-empty lines of a command's output, indented."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n  ".join(lines[-3:]) or "no output"
