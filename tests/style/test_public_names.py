"""The public names: a list that changes on purpose, together with the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import farandole as fd

ROOT = Path(__file__).resolve().parents[2]

PUBLIC = [
    "CommError", "ConfigError", "FarandoleError", "LaunchError", "Mismatch", "OneBitAdam", "PeerLost", "Plan",
    "PlanError", "Stalled", "VerificationFailed", "World", "__version__", "distribute", "exchange_state", "init",
    "load_exchange_state", "log", "mean", "phase", "preempted", "record", "shard", "shutdown", "verify", "world",
]  # fmt: skip


def test_public_names() -> None:
    assert sorted(fd.__all__) == PUBLIC
    assert dir(fd) == PUBLIC
    for name in PUBLIC:
        assert getattr(fd, name) is not None
        assert name == "__version__" or getattr(fd, name).__doc__, f"{name} is not documented"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(fd, "nothing_of_that_name")


def test_every_public_name_is_documented() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for name in PUBLIC:
        assert name.startswith("__") or f"`fd.{name}" in text, f"docs/api.md does not speak of fd.{name}"


def test_changelog_speaks_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(fd.__version__)}\b", text, re.M), fd.__version__


def test_every_plan_key_is_documented() -> None:
    text = (ROOT / "docs" / "plan.md").read_text()
    for key in fd.Plan().to_mapping():
        assert f"`{key}`" in text, f"docs/plan.md does not speak of {key}"
