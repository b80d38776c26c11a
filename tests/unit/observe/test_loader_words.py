"""What a gain of more workers is estimated from, in words."""

from __future__ import annotations

import pytest

from farandole.observe.diagnose.finders.loader_fixes import LoaderFacts, _basis


@pytest.mark.parametrize(
    ("workers", "said"), [(1, "1 worker makes a batch in 2 s"), (3, "3 workers make a batch in 2 s")]
)
def test_one_worker_is_no_plural(workers: int, said: str) -> None:
    facts = LoaderFacts(workers, 1.0, 2.0, None, 1.0, 1.0, 1.0, None)
    assert _basis(facts, 12).startswith(said)
    assert _basis(facts, 12).endswith("; 12 in proportion")
