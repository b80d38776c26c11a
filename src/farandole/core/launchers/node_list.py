"""Lists of nodes as Slurm writes them, expanded: ``node[1-3,07],gpu5``. Pure parsing, no command is asked.

>>> expand_node_list("node[1-3,07],gpu5")
['node1', 'node2', 'node3', 'node07', 'gpu5']
"""

from __future__ import annotations

import re
from itertools import product

from ..vocabulary.errors import ConfigError

MOST_NODES = 65536
_PIECE = re.compile(r"([A-Za-z0-9_.:-]*)(?:\[([0-9,-]+)\])?")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_node_list(text: str, *, where: str = "the list of nodes") -> list[str]:
    """Return the names in `text`, in their order.

    Numbers keep their leading zeros (``[08-10]`` is 08, 09, 10); a name may hold several brackets. Raises
    `ConfigError` naming `where` for what is no list of nodes, and for more than 65,536 names.
    """
    names: list[str] = []
    for item in _split(text, where):
        names += _expand_one(item, where, MOST_NODES - len(names))
    return names


def _split(text: str, where: str) -> list[str]:
    """Split at the commas outside brackets."""
    items, depth, begin = [], 0, 0
    for position, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            items.append(text[begin:position])
            begin = position + 1
        if depth not in (0, 1):
            break
    items.append(text[begin:])
    if depth != 0 or not all(items):
        raise _refuse(text, where)
    return items


def _expand_one(item: str, where: str, room: int) -> list[str]:
    parts: list[list[str]] = []
    position = 0
    while position < len(item):
        found = _PIECE.match(item, position)
        if found is None or found.end() == position:
            raise _refuse(item, where)
        position = found.end()
        parts.append([found[1]])
        if found[2] is not None:
            parts.append(_numbers(found[2], item, where, room))
    count = 1
    for part in parts:
        count *= len(part)
    if count > room:
        raise _too_many(where)
    return ["".join(words) for words in product(*parts)]


def _numbers(text: str, item: str, where: str, room: int) -> list[str]:
    found: list[str] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _refuse(item, where)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _refuse(item, where)
        if int(last) - int(first) >= room - len(found):
            raise _too_many(where)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _refuse(text: str, where: str) -> ConfigError:
    return ConfigError(f"{where}: {text!r} is no list of nodes", remedy="expected for example node[1-3,07],gpu5")


def _too_many(where: str) -> ConfigError:
    return ConfigError(f"{where} names more than {MOST_NODES} nodes")
