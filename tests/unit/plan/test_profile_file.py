"""A profile as a file: all of it comes back, and what is wrong is named with the field's path."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.errors import ConfigError
from farandole.plan.memory import ActivationFacts, ModelFacts, OptimizerFacts, WeightFacts
from farandole.plan.profile import (
    AttentionFacts,
    ExpertFacts,
    ModelProfile,
    ModelUnit,
    TensorFacts,
    UnitGradient,
    UnitTimes,
    profile_from_mapping,
    profile_to_mapping,
    read_profile,
    write_profile,
)

_UNIT = ModelUnit(
    name="layers.0",
    kind="Layer",
    count=3,
    gradients=(UnitGradient("layers.0.weight", 64, 80), UnitGradient("layers.0.bias", 64, 1)),
    frozen_bytes=8,
    forward_flops=1e6,
    backward_flops=2e6,
    operations=5,
    moved_bytes=1e5,
    saved_bytes=5e4,
    output_bytes=256.0,
    tensor=TensorFacts(4, 5120, 1e6, 2e4, 256.0, 2, 1),
    expert=ExpertFacts(8, 100, 1e5, 512.0),
    attention=AttentionFacts(4, 512.0, 16, 4e4),
    times=UnitTimes(1e-3, 1e-4, 2e-3, 2e-4, (1, 2, 4), 2, 0.05, 0.1),
)
PROFILE = ModelProfile(
    name="Model",
    units=(_UNIT, replace(_UNIT, name="head", tensor=None, expert=None, attention=None, times=None)),
    samples=2,
    batch_bytes=128.0,
    memory=ModelFacts(
        {"fp32": WeightFacts(100, 0, 100, 25, 2, 80, 0, 50)},
        {"fp32": OptimizerFacts(8.0, 4.0, 12.0, False)},
        {("fp32", "none"): ActivationFacts(10, 0, 20)},
        failed=(("bf16", "blocks"),),
    ),
    optimizer="adamw",
    optimizer_state_bytes=8.0,
    optimizer_moved_bytes=28.0,
    blocks=3,
    device="cuda",
    notes=("a note",),
    measured={"host": "a"},
)


def test_a_file_holds_all_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    assert read_profile(path) == PROFILE, "what was written is read"
    write_profile(replace(PROFILE, name="Other"), path)
    assert read_profile(path).name == "Other", "a file of that name is replaced"
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"], "nothing else is left"


_WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda m: m.update(version=2), "version = 2, expected 1"),
    (lambda m: m.update(format="x"), "is no profile of a model"),
    (lambda m: m.update(blokcs=3), r"blokcs: unknown key; did you mean 'blocks'"),
    (lambda m: m.update(units=[]), "units: a model has at least one"),
    (lambda m: m.update(units={}), r"units = \{\}, expected a list"),
    (lambda m: m.update(samples=0), "samples = 0, expected at least 1"),
    (lambda m: m["units"][1].pop("kind"), r"units\.1\.kind is missing; make it again"),
    (lambda m: m["units"][0].update(count=True), r"units\.0\.count = True, expected a whole number"),
    (lambda m: m["units"][0].update(saved_bytes=-1), r"units\.0\.saved_bytes = -1.0, expected at least 0"),
    (lambda m: m["units"][0].update(forward_flops=float("nan")), r"units\.0\.forward_flops = nan"),
    (lambda m: m["units"][0]["gradients"][1].update(rows="x"), r"gradients\.1\.rows = 'x', expected a whole"),
    (
        lambda m: m["units"][0]["times"].update(forward_fixed_seconds=-1e-9),
        r"times\.forward_fixed_seconds = -1e-09",
    ),
    (lambda m: m["units"][0]["tensor"].update(flops=1e9), r"units\.0\.tensor\.flops = 1e\+09, more than"),
    (lambda m: m["units"][0].update(fused_flops=2e6), r"units\.0\.fused_flops = 2e\+06, more than forward_flops"),
    (lambda m: m["units"][0].update(products=10**6), r"units\.0\.products = 1e\+06, more than operations"),
    (lambda m: m["units"][0]["tensor"].update(divides=0), r"tensor\.divides = 0, expected at least 1"),
    (
        lambda m: m["memory"]["activations"].update({"fp32": {}}),
        r"memory\.activations\.fp32: expected 2 parts as key",
    ),
    (lambda m: m["memory"]["optimizer"].clear(), r"memory\.optimizer\.fp32: is missing"),
    (lambda m: m["memory"]["weights"].update(fp32=3), r"memory\.weights\.fp32 = 3, expected a table"),
    (lambda m: m.update(notes=[3]), r"notes\.0 = 3, expected a text"),
    (lambda m: m.update(device="gpu"), r"device = 'gpu', expected 'cpu' or 'cuda'"),
    (lambda m: m.update(elementwise_optimizer=1), r"elementwise_optimizer = 1, expected true or false"),
]


@pytest.mark.parametrize(("change", "said"), _WRONG)
def test_what_is_wrong_is_named_with_its_place(change: Callable[[dict[str, Any]], Any], said: str) -> None:
    mapping = json.loads(json.dumps(profile_to_mapping(PROFILE)))
    change(mapping)
    with pytest.raises(ConfigError, match=said):
        profile_from_mapping(mapping, "model.json")


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ConfigError, match=r"there is no file .*x\.json; make it again"):
        read_profile(path)
    for text, said in ((b"{", "is not JSON"), (b"[]", "holds a list"), (b"\xff\xfe", "cannot read .*'utf-8'")):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=said):
            read_profile(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_profile(PROFILE, tmp_path / "missing" / "x.json")
