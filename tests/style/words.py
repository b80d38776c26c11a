"""Words that docs, comments, docstrings and messages do not use, each with what to write instead.

The reader is an engineer who knows DDP, FSDP2 and Horovod and may have learned English as a second language:
short main clauses, the field's terms, no riddles. `BANNED` lists what does not serve that reader.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Banned(NamedTuple):
    """A pattern and what to write instead."""

    pattern: re.Pattern[str]
    instead: str


class Use(NamedTuple):
    """One use of a banned word: where, the text around it, and what to write instead."""

    line: int
    text: str
    instead: str


BANNED = [
    Banned(re.compile(pattern), instead)
    for pattern, instead in {
        r"\b([Nn]o|[Ss]ome|[Aa]ny|[Ee]very)body\b": "name the rank, the user, the process or the thread",
        r"(?:\A|[.:;!?|]\s+|\n\s*\n\s*)Of (?!course)": "a sentence that begins with its subject",
        r"\b[Bb]ack ends?\b": "backend",
        r"\b[Pp]rocessors?\b": "CPU",
        r"\b[Aa] person('s)?\b": "a user, user-defined",
        r"\b[Ww]hat (?:is|was|were) left\b": "the residual, the remainder",
        r"\b(?:by|in|[Tt]akes?|[Tt]aking|took) turns\b": "alternately, interleaved, round-robin, double-buffered",
        r"\b[Rr]eckon\w*": "estimate",
        r"\b[Dd]ear(?:er|est)\b": "costlier, costliest",
        r"\b[Tt]hrice\b": "three times",
        r"\b[Mm]end(?:s|ed|ing)?\b": "fix",
        r"\bin (?:the )?place of\b": "instead of",
        r"\bfor want of\b": "without",
        r"\b[Uu]nheard\b": "unknown",
        r"\b[Cc]ulprit": "the rank that failed first, the root cause",
        r"\bwhom\b": "name the rank, the process or the object",
        r"\b[Ww]hoever\b": "name the rank, the process or the caller",
        r"\b[Oo]ne who\b": "name the rank, the process or the caller",
        r"\bby way of\b": "through",
    }.items()
]  # fmt: skip


def uses(text: str) -> Iterator[Use]:
    """Yield the banned words of a text, with the line (from 1) that each stands in."""
    for banned in BANNED:
        for match in banned.pattern.finditer(text):
            around = text[max(0, match.start() - 40) : match.end() + 40]
            yield Use(text.count("\n", 0, match.start()) + 1, " ".join(around.split()), banned.instead)


def prose_of_page(markdown: str) -> str:
    """Return a page without its code blocks, with as many lines: they show what programs print."""
    return re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), markdown, flags=re.M | re.S)


def uses_in_page(path: Path) -> list[Use]:
    """Return the banned words of a Markdown page."""
    return sorted(uses(prose_of_page(path.read_text())))


def uses_in_source(source: str, tree: ast.AST | None = None) -> list[Use]:
    """Return the banned words in a module's comments, docstrings and other strings that are no single word."""
    texts = [
        (token.start[0], token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    texts += [
        (node.lineno, node.value)
        for node in ast.walk(tree or ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip()
    ]
    return sorted(use._replace(line=line + use.line - 1) for line, text in texts for use in uses(text))
