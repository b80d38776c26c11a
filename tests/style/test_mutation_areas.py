"""The table of `benchmarks/mutants.py` follows files that move."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.areas import AREAS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", AREAS)
def test_what_an_area_names_is_there(name: str) -> None:
    sources = [ROOT / "src" / "farandole" / each for each in AREAS[name].sources]
    tests = [ROOT / "tests" / each.partition("::")[0] for each in AREAS[name].tests]
    assert [str(path) for path in [*sources, *tests] if not path.exists()] == []
    assert len(AREAS[name].files(ROOT / "src")) > 2
    for each in AREAS[name].tests:
        file, _, function = each.partition("::")
        assert f"def {function}" in (ROOT / "tests" / file).read_text(), each
