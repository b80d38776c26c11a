"""What other people wrote, made fit to be shown: no character that moves a cursor, and no more than one reads."""

from __future__ import annotations

MOST_LINE_CHARACTERS = 1500
MOST_VALUE_CHARACTERS = 100


def plain(text: str) -> str:
    r"""Return `text` for a terminal: odd characters escaped, lines without end cut in the middle.

    >>> plain("no host \x1b[2Ja")
    'no host \\x1b[2Ja'
    """
    return "\n".join(shortened(_escaped(line), MOST_LINE_CHARACTERS) for line in text.split("\n"))


def quoted(value: str) -> str:
    """Return a value that was written wrong, in quotation marks, as an error shows it; a long one in part."""
    return repr(shortened(value, MOST_VALUE_CHARACTERS))


def shortened(text: str, most_characters: int) -> str:
    """Return `text`, or its beginning, how long it was, and its end."""
    if len(text) <= most_characters:
        return text
    middle = f"...({len(text)} characters)..."
    end = (most_characters - len(middle)) // 3
    return text[: most_characters - len(middle) - end] + middle + text[-end:]


def _escaped(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)
