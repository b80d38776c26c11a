"""What a gain of more workers is estimated from, in words."""

from __future__ import annotations

import pytest

from farandole.observe.diagnose.loader_fixes import LoaderFacts, _basis, loader_fixes


@pytest.mark.parametrize(
    ("workers", "said"), [(1, "1 worker makes a batch in 2 s"), (3, "3 workers make a batch in 2 s")]
)
def test_one_worker_is_no_plural(workers: int, said: str) -> None:
    facts = LoaderFacts(workers, 1.0, 2.0, None, 1.0, 1.0, None)
    assert _basis(facts, 12).startswith(said)
    assert _basis(facts, 12).endswith("; 12 in proportion")


def test_a_fix_is_whole_words() -> None:
    """It may be the end of a verdict."""
    alone = LoaderFacts(0, 1.0, 2.0, 0.1, 8.0, 1.0, 8.0)
    assert loader_fixes(alone)[1][0].what == "load batches ahead of time in 2 processes of their own"
    more = LoaderFacts(2, 1.0, 2.0, None, 8.0, 1.0, 8.0)
    assert loader_fixes(more)[1][0].what.endswith(" workers instead of 2")
