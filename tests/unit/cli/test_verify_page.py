"""The page of `farandole verify`: what failed, what is not exact, and what that means together."""

from __future__ import annotations

from typing import Any

from farandole.cli.commands.verify import _page


def check(name: str, passed: bool | None, word: str = "", remedy: str = "do this") -> dict[str, Any]:
    return {"name": name, "passed": passed, "answer": "so it is", "remedy": remedy, "word": word}


def test_what_is_not_exact_has_its_remedy_and_fails_nothing() -> None:
    lines = _page({"checks": [check("ranks", True), check("batch norm", None, "not exact"), check("loss", None)]})
    assert lines.splitlines() == [
        "         ok  ranks: so it is",
        "  not exact  batch norm: so it is",
        "             -> do this",
        "not checked  loss: so it is",
        "In order, but for 2 things to know.",
    ]
    assert _page({"checks": [check("ranks", True)]}).endswith("All in order.")
    assert _page({"checks": [check("ranks", False), check("loss", None, "not exact")]}).endswith("1 check failed.")
