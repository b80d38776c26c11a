"""What makes a plan lossy: the codecs that it names, the same at every stage; a permission alone does not."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.core.vocabulary.spec import Plan
from farandole.plan.search.space import fixed_is_lossy, is_lossy


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_codec_is_lossy_and_a_permission_is_not_at_every_stage(zero: int) -> None:
    assert not is_lossy(Plan(zero=zero))
    assert not is_lossy(Plan(zero=zero, lossy=True)), "nothing chooses by it"
    assert is_lossy(Plan(zero=zero, codec="int8"))
    assert Plan(zero=zero, codec="int8", lossy=True).lossy_keys() == {"codec": "int8"}
    if zero:
        assert Plan(zero=zero, weight_codec="int8").lossy_keys() == {"weight_codec": "int8"}
    assert not is_lossy(Plan(zero=zero, frozen_codec="int4")), "stored, not exchanged"


def test_auto_is_lossy_by_permission() -> None:
    assert not is_lossy(Plan(codec="auto"))
    assert is_lossy(Plan(codec="auto", lossy=True))
    assert Plan(codec_for={"a.*": "int4", "b.*": "none"}).lossy_keys() == {"codec": "int4"}


@pytest.mark.parametrize(
    "fixed", [{"weight_codec": "int8"}, {"expert_codec": "bf16"}, {"codec_for": {"*": "int4"}}]
)
def test_what_the_user_fixed_is_what_the_user_asked_for(fixed: dict[str, Any]) -> None:
    assert fixed_is_lossy(fixed)
    assert not fixed_is_lossy({"tensor": 2})
