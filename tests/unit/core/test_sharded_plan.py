"""Plan keys of ZeRO stage 3: which go together, and which are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan


@pytest.mark.parametrize(
    "keys",
    [
        {"zero": 3},
        {"zero": 3, "shard_within": "host"},
        {"zero": 3, "codec": "int8:block=128", "weight_codec": "int8"},
        {"zero": 3, "codec": "fp16"},
        {"zero": 3, "lossy": True},
        {"zero": 1, "codec": "int4", "weight_codec": "int8", "lossy": True},
        {"zero": 3, "codec": "bf16", "accumulate": 4, "clip_norm": 1.0},
        {"zero": 3, "offload": "disk", "shard_within": "host"},
    ],
)
def test_plans_that_fit(keys: dict[str, Any]) -> None:
    plan = Plan.from_mapping(keys, where="test")
    assert Plan.from_mapping(plan.to_mapping(), where="test") == plan, "it can be stored"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"zero": 4}, "zero = 4, expected 0 to 3; 3 shards most"),
        ({"shard_within": "host"}, 'shard_within = "host" with zero = 0: it is for zero = 3'),
        ({"weight_codec": "int8"}, 'weight_codec = "int8" with zero = 0: it is for zero = 1 to 3'),
        ({"overlap_gather": True}, "overlap_gather = true with zero = 0: it is for zero = 1 and 2"),
        ({"zero": 3, "overlap_gather": True}, "with zero = 3: it is"),
        ({"zero": 2, "shard_within": "host"}, "with zero = 2: it is"),
        (
            {"zero": 1, "precision": "bf16", "bf16_parameters": True, "weight_codec": "int8"},
            'weight_codec = "int8" and zero = 1: what travels packed',
        ),
        ({"zero": 1, "precision": "fp16", "nonfinite": "skip"}, 'precision = "fp16", which skips steps'),
        ({"zero": 3, "weight_codec": "int4"}, "weight_codec"),
        ({"zero": 3, "codec": "topk"}, "use one of none, fp16, bf16, int8"),
        ({"zero": 3, "codec": "auto"}, "a rank has shards"),
        ({"zero": 3, "codec": "int4"}, "a rank has shards"),
        ({"zero": 3, "route": "flat"}, 'route = "flat" with zero = 3'),
        ({"zero": 3, "bucket_bytes": "8MiB"}, "bucket_bytes = 8388608 with zero = 3"),
        ({"zero": 3, "codec_for": {"*": "int8"}}, "codec_for"),
        ({"zero": 3, "connections": 2}, "connections = 2 with zero = 3"),
        ({"zero": 3, "shard_within": "host", "codec": "int8"}, 'codec = "int8" with shard_within'),
        ({"zero": 3, "shard_within": "host", "weight_codec": "int8"}, 'weight_codec = "int8" with shard_within'),
    ],
)
def test_plans_that_do_not_fit_say_what_to_do(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_mapping(keys, where="test")
    assert words in str(caught.value), f"{words!r} in {caught.value}"


@pytest.mark.parametrize(("key", "unset", "value"), [("ranks_per_switch", 0, 2), ("switch_of", {}, {"a": "b"})])
def test_a_plan_of_an_earlier_version_is_read_if_it_did_not_set_what_is_gone(
    key: str, unset: Any, value: Any
) -> None:
    earlier = {**Plan(zero=1).to_mapping(), key: unset}
    assert Plan.from_mapping(earlier, where="plan.toml") == Plan(zero=1)
    with pytest.raises(PlanError, match=f'plan.toml: {key} = .* is gone.* route = "hierarchical"'):
        Plan.from_mapping({key: value}, where="plan.toml")
    assert Plan.from_mapping({"exchange": {key: unset}}, where="plan.toml") == Plan()


@pytest.mark.parametrize("route", ["server", "sharded_server"])
def test_routes_that_are_gone_name_what_took_their_place(route: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(f'route = "{route}"\n')
    makers: list[Callable[[], Plan]] = [
        lambda: Plan(route=route),  # type: ignore[arg-type]
        lambda: Plan.from_mapping({"route": route}, where="--set"),
        lambda: Plan.read(tmp_path / "plan.toml"),
    ]
    for make in makers:
        with pytest.raises(PlanError, match=f"route = '{route}' is gone") as caught:
            make()
        assert 'sync = "server:staleness=0"' in caught.value.remedy
