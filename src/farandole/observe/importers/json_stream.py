"""Reads JSON value by value from pieces of text; holds one piece and the value at its end.

::

    stream = JsonStream(pieces)
    stream.expect("[")
    for event in stream.elements():
        ...

It knows nothing of traces. A value is parsed by the standard library's decoder as soon as it is whole; a piece may
end anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

_BLANK = " \t\r\n"
_BLANKS = re.compile(r"[ \t\r\n]*")
_UNSURE = 16
"""Characters before a piece's end in which an error may be of the cut: none of JSON's short tokens is longer."""
_CUT_TOKEN = re.compile(r"(t|tr|tru|f|fa|fal|fals|n|nu|nul|N|Na|-?(I[a-z]*)?|[.eE][+-]?)\s*")
_MOST_CHARACTERS = 16 << 20


class Damaged(Exception):
    """The text is no JSON at a place, or ends there: `is_cut`."""

    def __init__(self, what: str, line: int, column: int, *, is_cut: bool = False) -> None:
        super().__init__(f"{what} at line {line}, column {column}")
        self.is_cut = is_cut


class JsonStream:
    """A place in a text that comes in pieces.

    `most_characters` is the longest value that is taken for one. What is wrong raises `Damaged`.
    """

    def __init__(self, pieces: Iterable[str], most_characters: int = _MOST_CHARACTERS) -> None:
        self._pieces = iter(pieces)
        self._most = most_characters
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._at = "", 0
        self._line, self._column = 1, 1  # of the first character in _text

    def peek(self) -> str:
        """Return the next character that is no blank; an empty string at the end."""
        while True:
            character = self._text[self._at : self._at + 1]
            if character and character not in _BLANK:
                return character
            match = _BLANKS.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at == len(self._text) and not self._more():
                return ""

    def expect(self, character: str) -> None:
        """Step over this character."""
        if self.peek() != character:
            raise self._wrong(f"expected {character}")
        self._at += 1

    def end(self) -> None:
        """Make sure that nothing follows but blanks."""
        if self.peek():
            raise self._wrong("expected nothing more")

    def value(self) -> Any:
        """Return the value that begins at the next character."""
        self.peek()
        while True:
            end, problem, place = self._at, "", self._at
            try:
                found, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                problem, place = error.msg.removesuffix(" at"), error.pos
                if not problem.startswith("Unterminated string") and place < len(self._text) - _UNSURE:
                    raise self._damaged(problem, place) from None
            except RecursionError:
                raise self._damaged("a value is nested too deeply", self._at) from None
            except ValueError:  # an integer of thousands of digits
                raise self._damaged("a number is too long", self._at) from None
            # A number may go on behind a point or an exponent that only begins in this piece.
            is_whole = not problem and len(self._text) - end > (0 if isinstance(found, (dict, list, str)) else 3)
            if (end if is_whole else len(self._text)) - self._at > self._most:
                raise self._damaged(f"a value is longer than {self._most:,} characters", self._at)
            if is_whole or not self._more():
                if not problem:
                    break
                raise self._damaged(problem, place, is_cut=_is_of_cut(problem, self._text[place:]))
        self._at = end
        return found

    def elements(self) -> Iterator[Any]:
        """Yield the values of the array whose bracket was stepped over, and step over its end."""
        if self.peek() != "]":
            yield self.value()
        while self.peek() != "]":
            if self.peek() != ",":
                raise self._wrong("expected , or ]")
            self._at += 1
            yield self.value()
        self._at += 1

    def members(self) -> Iterator[str]:
        """Yield the keys of the object whose brace was stepped over, each before its value; step over its end.

        After a key, the caller skips its value before it takes the next one.
        """
        before = False
        while (character := self.peek()) != "}":
            if before:
                if character != ",":
                    raise self._wrong("expected , or }")
                self._at += 1
            if self.peek() != '"':
                raise self._wrong("expected a key in quotes")
            key = self.value()
            self.expect(":")
            yield key
            before = True
        self._at += 1

    def _more(self) -> bool:
        """Append a piece to the unread text; return whether there was one."""
        for piece in self._pieces:
            if piece:
                self._line, self._column = self._place(self._at)
                self._text, self._at = self._text[self._at :] + piece, 0
                return True
        return False

    def _place(self, at: int) -> tuple[int, int]:
        lines = self._text.count("\n", 0, at)
        column = at - self._text.rfind("\n", 0, at) if lines else self._column + at
        return self._line + lines, column

    def _wrong(self, what: str) -> Damaged:
        character = self.peek()
        found = f", found {character!r}," if character else ", and the text ends"
        return self._damaged(what + found, self._at, is_cut=not character)

    def _damaged(self, what: str, at: int, *, is_cut: bool = False) -> Damaged:
        return Damaged(what, *self._place(at), is_cut=is_cut)


def _is_of_cut(problem: str, rest: str) -> bool:
    """Return whether what the decoder says of the last value is only that it ends too early."""
    if "\\u" in problem:
        return len(rest) <= len("\\uXXXX")
    return problem.startswith("Unterminated") or _CUT_TOKEN.fullmatch(rest) is not None
