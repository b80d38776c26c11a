"""What the variables of a Horovod job mean."""

from __future__ import annotations

import pytest

from farandole.core.job_plan import HorovodVariables, PlanRequest, read_horovod_variables
from farandole.core.vocabulary.errors import ConfigError


def test_without_variables() -> None:
    assert read_horovod_variables({}) == HorovodVariables()


def test_all_variables() -> None:
    settings = read_horovod_variables(
        {
            "HOROVOD_FUSION_THRESHOLD": "1024",
            "HOROVOD_CACHE_CAPACITY": "0",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "2.5",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5",
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
            "HOROVOD_TIMELINE": "out/trace.json",
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "30",
        }
    )
    plan = {
        "bucket_bytes": PlanRequest(1024, "HOROVOD_FUSION_THRESHOLD=1024"),
        "timeout_seconds": PlanRequest(5.0, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=5"),
    }
    assert settings == HorovodVariables(1024, 0, 2.5, 5.0, True, "out/trace.json", False, True, 30.0, plan)


@pytest.mark.parametrize("spelling", ["DYNAMIC", "dynamic"])
def test_a_dynamic_timeline(spelling: str) -> None:
    settings = read_horovod_variables({"HOROVOD_TIMELINE": spelling})
    assert settings.timeline_is_dynamic
    assert settings.timeline == ""


def test_stall_check_disabled() -> None:
    variables = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}
    settings = read_horovod_variables(variables)
    assert (settings.stall_warning_seconds, settings.stall_shutdown_seconds) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "HOROVOD_FUSION_THRESHOLD='64MB': expected a whole number"),
        ("HOROVOD_FUSION_THRESHOLD", "-1", "HOROVOD_FUSION_THRESHOLD=-1: expected at least 0"),
        ("HOROVOD_CACHE_CAPACITY", "many", "HOROVOD_CACHE_CAPACITY='many': expected a whole number"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "1m", "HOROVOD_STALL_CHECK_TIME_SECONDS='1m': expected a number"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "-3", "HOROVOD_STALL_CHECK_TIME_SECONDS=-3: expected at least 0"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "inf", "HOROVOD_STALL_CHECK_TIME_SECONDS=inf: expected at least 0"),
        ("HOROVOD_DYNAMIC_PROCESS_SETS", "maybe", "HOROVOD_DYNAMIC_PROCESS_SETS='maybe': expected 1 or 0"),
        ("HOROVOD_AUTOTUNE", "often", "HOROVOD_AUTOTUNE='often': expected 1 or 0"),
    ],
)
def test_values_that_make_no_sense(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_horovod_variables({name: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "wishes"),
    [
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1", {"route": "hierarchical"}),
        ("HOROVOD_TORUS_ALLREDUCE", "1", {"route": "hierarchical"}),
        ("HOROVOD_AUTOTUNE", "1", {"codec": "auto"}),
        ("HOROVOD_AUTOTUNE", "0", {}),
        ("HOROVOD_FUSION_THRESHOLD", "0", {"bucket_bytes": 1}),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0", {}),
    ],
)
def test_what_variables_ask_of_the_plan(name: str, value: str, wishes: dict[str, object]) -> None:
    plan = read_horovod_variables({name: value}).plan
    assert {key: wish.value for key, wish in plan.items()} == wishes
    assert all(wish.source == f"{name}={value}" for wish in plan.values())


def test_a_shutdown_before_the_warning_is_left_out_with_a_warning() -> None:
    settings = read_horovod_variables({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"})
    assert (settings.stall_warning_seconds, settings.stall_shutdown_seconds, settings.plan) == (60.0, 0.0, {})
    (warning,) = settings.warnings
    assert warning.startswith("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=30 has no effect: it is below HOROVOD_STALL_")
