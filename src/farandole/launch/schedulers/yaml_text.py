"""Plain data as YAML text, for manifests: block style, keys in their order, nothing needed to write it.

>>> print(to_yaml({"kind": "Job", "args": ["run", "8"]}), end="")
kind: Job
args:
- run
- "8"
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS_WITH_A_MEANING = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def to_yaml(value: Any) -> str:
    """Return mappings, sequences, texts, numbers, booleans and None as one YAML document."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        found = []
        for key, each in value.items():
            below = _lines(each)
            if _is_nested(each):
                indent = "" if isinstance(each, Sequence) else "  "
                found += [f"{_scalar(key)}:", *(indent + line for line in below)]
            else:
                found.append(f"{_scalar(key)}: {below[0]}")
        return found
    if _is_nested(value):
        found = []
        for each in value:
            first, *rest = _lines(each)
            found += [f"- {first}", *("  " + line for line in rest)]
        return found
    return [_scalar(value)]


def _is_nested(value: Any) -> bool:
    return isinstance(value, Sequence | Mapping) and not isinstance(value, str) and bool(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS_WITH_A_MEANING:
        return value
    # JSON's scalars and empty brackets are YAML's, but for its escapes of letters beyond 16 bits.
    text = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in text)
