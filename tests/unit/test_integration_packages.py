"""Without its package a front end is an ImportError that says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "blocked", "extra"),
    [
        ("accelerate", "accelerate", "accelerate"),
        ("transformers", "transformers", "transformers"),
        ("lightning", "lightning", "lightning"),
    ],
)
def test_a_missing_package_is_named(
    module: str, blocked: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"farandole.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, blocked, None)
    with pytest.raises(ImportError, match=rf'{name} needs .*pip install "farandole\[{extra}\]"'):
        importlib.import_module(name)
