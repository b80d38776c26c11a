"""The public names: a list that changes on purpose, together with the documentation."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import farandole as fd
from tests.style.api_rows import GROUPS, TABLES, tables
from tests.style.diagrams import DIAGRAMS, FOLDER

ROOT = Path(__file__).resolve().parents[2]

PUBLIC = [
    "CheckpointError", "Checkpointer", "CommError", "ConfigError", "FarandoleError", "LaunchError",
    "Mismatch", "MixtureOfExperts", "NoiseScale", "OneBitAdam", "PeerLost", "Plan", "PlanError",
    "RowCopy", "RowTable", "Stalled", "VerificationFailed", "World", "__version__", "accumulate", "averaged",
    "barrier",
    "chunked_cross_entropy", "context_gather", "context_positions", "context_shard", "distribute",
    "drain", "evaluate", "exchange_state", "find_micro_batch", "find_plan", "freeze", "gather", "init", "load",
    "load_exchange_state", "log", "low_rank_adapters", "main_first", "mean", "noise_scale", "notebook",
    "phase", "preempted", "prefetch", "print", "record", "router_loss", "save", "seed", "shard", "shutdown",
    "step", "verify", "weight", "world",
]  # fmt: skip


def test_public_names() -> None:
    assert sorted(fd.__all__) == PUBLIC
    assert dir(fd) == PUBLIC
    for name in PUBLIC:
        assert getattr(fd, name) is not None
        assert name == "__version__" or getattr(fd, name).__doc__, f"{name} is not documented"


def test_completion_shows_public_names_only() -> None:
    """What an editor lists: the names of the file, whatever `dir` says."""
    tree = ast.parse(Path(fd.__file__).read_text())
    bound = [name for node in tree.body for name in _bound(node)]
    assert not [name for name in bound if not name.startswith("_") and name not in PUBLIC]


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.If):
        return [name for each in node.body for name in _bound(each)]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(fd, "nothing_of_that_name")


def test_every_public_name_is_documented() -> None:
    shown = [name for names in GROUPS.values() for name in names]
    assert sorted([*shown, "__version__"]) == PUBLIC, "GROUPS in tests/style/api_rows.py"
    assert TABLES.read() == tables(), "docs/reference/api.md: python -m tests.style writes its tables"


@pytest.mark.parametrize("name", DIAGRAMS)
def test_diagrams_are_what_is_drawn(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text() == DIAGRAMS[name](), "python -m tests.style draws them"


def test_changelog_speaks_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(fd.__version__)}\b", text, re.M), fd.__version__


def test_every_plan_key_is_documented() -> None:
    text = (ROOT / "docs" / "reference/plan.md").read_text()
    for key in fd.Plan().to_mapping():
        assert f"`{key}`" in text, f"docs/reference/plan.md does not speak of {key}"
