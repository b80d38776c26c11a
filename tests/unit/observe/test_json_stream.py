"""JSON in pieces of any size: read as the standard library reads the whole, and refused where it is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.observe.importers.json_stream import Damaged, JsonStream

TRICKY: list[Any] = [
    {"name": 'a "quoted" \\ name', "ts": -1.25e-7, "args": {"é\U0001f600": [True, False, None]}},
    {}, [], "", 0, -12.5, 1e22, {"deep": [[[{"x": "]},{["}]]]}, "\u2028 \ud83d", float("inf"), float("-inf"),
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def elements(pieces: list[str], most_characters: int = 1 << 20) -> list[Any]:
    stream = JsonStream(pieces, most_characters)
    stream.expect("[")
    found = list(stream.elements())
    stream.end()
    return found


@settings(max_examples=50, deadline=None)
@given(st.lists(VALUES, max_size=5), st.sampled_from([None, 2]), st.booleans(), st.integers(1, 40))
def test_pieces_of_any_size(values: list[Any], indent: int | None, is_ascii: bool, size: int) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=is_ascii)
    assert elements(cut(text, size)) == values


@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_boundary_at_every_character(is_ascii: bool) -> None:
    text = json.dumps(TRICKY, indent=1, ensure_ascii=is_ascii)
    for at in range(len(text) + 1):
        assert elements([text[:at], "", text[at:]]) == TRICKY, f"{text[:at]!r} | {text[at:]!r}"
    assert elements(list(text)) == TRICKY


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=5), st.integers(1, 40))
def test_members_of_an_object(values: dict[str, Any], size: int) -> None:
    stream = JsonStream(cut(json.dumps(values, indent=1), size))
    stream.expect("{")
    assert {key: stream.value() for key in stream.members()} == values
    stream.end()


def test_an_end_at_every_character_leaves_what_was_whole() -> None:
    text = json.dumps(TRICKY)
    whole = [len(json.dumps(TRICKY[: count + 1])) - 1 for count in range(len(TRICKY))]
    for at in range(1, len(text)):
        for size in (1, 5, len(text)):
            stream = JsonStream(cut(text[:at], size))
            found: list[Any] = []
            stream.expect("[")
            with pytest.raises(Damaged) as problem:
                keep(stream, found)
            assert problem.value.is_cut or text[at - 1] in "-+.eE", (text[:at], str(problem.value))
            # A number that is cut may look whole: -12 of -12.5.
            sure = TRICKY[: sum(end <= at for end in whole)]
            assert found[: len(sure)] == sure, text[:at]
            assert len(found) <= len(sure) + 1


def keep(stream: JsonStream, found: list[Any]) -> None:
    """Append what comes before an error."""
    found.extend(stream.elements())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"a": 1},\n {"b" 2},\n{"c": 3}, {"d": "e"}]', "Expecting ':' delimiter at line 3, column 7"),
        ('[{"a": 1} {"b": 2}]', "expected , or ], found '{', at line 1, column 11"),
        ("[1,, 2]", "Expecting value at line 1, column 4"),
        ("[1]\n x", "expected nothing more, found 'x', at line 2, column 2"),
        ('["' + "a" * 120 + '"]', "a value is longer than 100 characters at line 1, column 2"),
        ("[\n" + "[" * 100_000, "a value is nested too deeply at line 2, column 1"),
        ("[" + "1" * 5000 + "]", "a number is too long at line 1, column 2"),
        ('{"a": 1}', "expected [, found '{', at line 1, column 1"),
        ("", "expected [, and the text ends at line 1, column 1"),
    ],
)  # fmt: skip
def test_where_it_is_damaged(text: str, message: str) -> None:
    for size in (1, 7, 64, len(text) + 1) if len(text) < 1000 else (len(text),):
        with pytest.raises(Damaged) as problem:
            elements(cut(text, size), 100 if len(text) < 1000 else 1 << 20)
        assert str(problem.value) == message


def test_no_more_is_read_of_a_value_without_end_than_the_limit() -> None:
    for begin, piece in (('["', "a" * 1000), ("[1.", "1" * 1000), ('[{"a": [', "1, " * 300)):
        read = 0

        def endless(begin: str = begin, piece: str = piece) -> Iterator[str]:
            nonlocal read
            yield begin
            while True:
                read += len(piece)
                yield piece

        stream = JsonStream(endless(), most_characters=20_000)
        stream.expect("[")
        with pytest.raises(Damaged, match="longer than 20,000 characters at line 1, column 2"):
            stream.value()
        assert read <= 22_000
