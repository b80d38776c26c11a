"""`farandole.keras.shard`: every sample once, equal steps, and the training of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.keras_jobs import needs_tensorflow
from tests.ranks.test_keras import play, require_equal_weights

pytestmark = [pytest.mark.full("slow"), needs_tensorflow, pytest.mark.timeout(500)]


def test_shares_are_the_whole_and_two_ranks_train_what_one_process_does(tmp_path: Path) -> None:
    one, ranks = play("keras_shard_script", tmp_path)
    failed = [*one.pop("failed"), *ranks.pop("failed")]
    assert not failed, "\n".join(failed)
    assert one.keys() == ranks.keys()
    assert len(one) == 3
    for case, found in one.items():
        require_equal_weights(case, ranks[case], found)
