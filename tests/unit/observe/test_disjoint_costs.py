"""Several faults at a time: each at its own cost, no second in two; and what codecs are predicted to save."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.cli.main import run
from farandole.comm.autotune.probe import measure_codecs
from farandole.core.vocabulary.events import SETUP_CODABLE, SETUP_FRONT_END
from farandole.observe.diagnose import Diagnosis, Finding, Fix, Gain, compare, diagnose, to_text
from farandole.observe.diagnose.loader_fixes import PREDICTED
from farandole.observe.diagnose.step_table import make_disjoint
from tests.unit.observe.synthetic import Machine, every, healthy, only, write_run

SLOW_LINK = 0.0075 + 8 * (6e6 / 200e6 + 2 * 20e-6) - 0.060
WORK = 0.097


def of(directory: Path, machine: Machine) -> Diagnosis:
    return diagnose(write_run(directory / "run", machine))


def costs(found: Diagnosis) -> dict[str, float]:
    return {finding.kind: finding.seconds for finding in found.findings}


def test_shared_cores_and_a_slow_link_each_have_their_own_cost(tmp_path: Path) -> None:
    """36 ms of the computing and 18 ms of the exchange ranks waited for a core."""
    length = WORK + SLOW_LINK
    tired = {
        "process_cores": (WORK - 0.036 + 0.030) / length, "core_wait_share": (0.036 + 0.018) / length,
        "machine_share": 0.99, "preemptions": 300,
    }  # fmt: skip
    found = of(tmp_path, healthy(steps=80, bytes_per_second=200e6, sample=dict.fromkeys(range(4), tired)))
    assert costs(found) == pytest.approx({"communication": SLOW_LINK, "oversubscribed": 0.036}, rel=0.15)
    assert found.bound == "communication"
    shared = next(finding for finding in found.findings if finding.kind == "oversubscribed")
    assert "the rest in the exchange's cost" in shared.evidence[0]


def test_accelerators_that_wait_since_cores_are_shared_do_not_wait_for_launches(tmp_path: Path) -> None:
    facts = {
        "process_cores": 0.5, "core_wait_share": 0.48, "machine_share": 0.99, "preemptions": 300, "gpu_share": 0.5,
    }  # fmt: skip
    found = of(tmp_path, healthy(steps=150, sample=dict.fromkeys(range(4), facts)))
    assert set(costs(found)) == {"oversubscribed"}, to_text(found)


def test_more_exchanges_than_needed_and_more_bytes_share_one_cost(tmp_path: Path) -> None:
    machine = healthy(exchanges=2, sent_factor=3.0, bytes_per_second=400e6)
    found = of(tmp_path, machine)
    exposed = 2 * (0.0075 + 8 * (18e6 / 400e6) - 0.060)
    assert sum(finding.seconds for finding in found.findings) == pytest.approx(exposed, rel=0.15), to_text(found)
    extra = [finding.seconds for finding in found.findings if finding.kind == "extra-exchange"]
    assert sorted(extra) == pytest.approx([exposed / 2 * 2 / 3, exposed / 2], rel=0.15)


def test_a_link_that_stalls_in_some_steps_is_communication_only(tmp_path: Path) -> None:
    found = of(tmp_path, healthy(steps=106, stall=every(10, 0.4)))
    assert costs(found) == pytest.approx({"communication": 0.4 * 9 / 96}, rel=0.15), to_text(found)


def test_data_that_is_late_in_some_steps_is_input_only(tmp_path: Path) -> None:
    found = of(tmp_path, healthy(steps=106, extra={"data": every(10, 0.4)}))
    assert costs(found) == pytest.approx({"input": 0.4 * 9 / 96}, rel=0.15), to_text(found)


def test_steps_of_a_full_accelerator_are_not_irregular_too(tmp_path: Path) -> None:
    full = {"process_cores": 1.0, "gpu_share": 0.9, "gpu_used_bytes": 99, "gpu_total_bytes": 100}
    machine = healthy(steps=150, extra={"forward": every(10, 0.4)}, sample=dict.fromkeys(range(4), full))
    found = of(tmp_path, machine)
    assert costs(found) == pytest.approx({"memory": 0.04}, rel=0.15), to_text(found)
    assert (found.bound, found.findings[0].ranks) == ("memory", (0, 1, 2, 3))


def test_a_straggler_a_slow_link_and_a_pause(tmp_path: Path) -> None:
    machine = healthy(
        steps=106, bytes_per_second=200e6, extra={"backward": only(1, 0.05), "checkpoint": every(20, 0.5, 0)}
    )
    found = of(tmp_path, machine)
    # The first bucket is ready later by what the slow backward takes of it, and more is hidden behind that.
    link = (0.110 / 8) + 8 * (6e6 / 200e6 + 2 * 20e-6) - 0.110
    assert costs(found) == pytest.approx(
        {"communication": link, "straggler": 0.05, "pause": 0.5 * 5 / 96}, rel=0.15
    ), to_text(found)
    assert sum(costs(found).values()) < (found.step_seconds or 0.0)


def test_what_is_reckoned_gets_what_the_others_leave() -> None:
    def finding(kind: str, seconds: float) -> Finding:
        fix = Fix("mend it", gain=Gain(seconds, "all of it"))
        return Finding(kind, f"costs {seconds * 1e3:.1f} ms a step", seconds, seconds, fixes=(fix,))

    kept = make_disjoint(
        [finding("communication", 0.7), finding("warm-up", 0.5), finding("memory", 0.6), finding("launch", 0.2)],
        1.0,
        {"communication": 0.8, "forward": 0.6, "backward": 0.6},
    )
    assert {each.kind: each.seconds for each in kept} == pytest.approx(
        {"communication": 0.7, "warm-up": 0.5, "memory": 0.3}
    )
    gain = kept[-1].fixes[0].gain
    assert gain is not None
    assert gain.seconds == pytest.approx(0.3)


LAYERS = tuple(f"layer{number}.weight" for number in range(4))
"""Of 1 MB each: matrices of 500 x 500."""


def gains(found: Diagnosis) -> dict[str, Gain]:
    return {
        f.paste.partition("codec=")[2].split()[0]: f.gain
        for f in found.findings[0].fixes
        if f.gain and "codec=" in f.paste
    }


def test_low_rank_and_auto_are_predicted_from_the_bytes_they_send(tmp_path: Path) -> None:
    slow = healthy(bytes_per_second=50e6, parameters=LAYERS)
    before = of(tmp_path / "before", slow)
    found = gains(before)
    assert list(found) == ["int4", "int8", "powersgd:rank=4", "auto", "bf16"], (
        "less of what costs some of the loss"
    )
    assert found["powersgd:rank=4"].seconds > found["int4"].seconds > 0.75 * found["powersgd:rank=4"].seconds
    text = to_text(before)
    assert "   or: codec powersgd:rank=4 (keeps a matrix of rank 4" in text
    assert "square" in found["powersgd:rank=4"].basis
    after = of(tmp_path / "after", healthy(bytes_per_second=50e6, parameters=LAYERS, sent_factor=2 * 4 / 500))
    assert before.step_seconds is not None
    assert after.step_seconds is not None
    assert found["powersgd:rank=4"].seconds == pytest.approx(before.step_seconds - after.step_seconds, rel=0.15)
    assert found["auto"].seconds == found["powersgd:rank=4"].seconds
    of_keras = gains(of(tmp_path / "keras", replace(slow, setup={SETUP_FRONT_END: "keras on tensorflow"})))
    assert of_keras["auto"].seconds == of_keras["int4"].seconds < found["auto"].seconds
    unknown = gains(of(tmp_path / "unknown", healthy(bytes_per_second=50e6)))
    assert "powersgd:rank=4" not in unknown, "nothing tells what is in the buckets"


def test_a_codec_that_is_slower_than_the_link_gains_nothing(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", healthy(bytes_per_second=200e6))
    free = gains(diagnose(path))
    fast, slow = 1 / 4e9, 1 / 20e6
    measured = gains(diagnose(path, {"bf16": fast, "int8": fast, "int4": slow}))
    assert set(measured) == {"bf16", "int8", "auto"}
    # 32 MB at 4 GB/s; all but the last of eight buckets is coded while others travel.
    assert 0 < free["int8"].seconds - measured["int8"].seconds < 32e6 * fast
    assert "4 GB per CPU second, as measured" in measured["int8"].basis
    assert "not included" in free["int8"].basis


def test_a_codec_gains_nothing_of_parameters_that_cannot_have_it(tmp_path: Path) -> None:
    slow = healthy(bytes_per_second=200e6)
    all_of_it = gains(of(tmp_path / "all", slow))["int8"].seconds
    half = gains(of(tmp_path / "half", replace(slow, setup={SETUP_CODABLE: 0.5})))["int8"].seconds
    assert 0 < half < 0.8 * all_of_it
    assert not gains(of(tmp_path / "none", replace(slow, setup={SETUP_CODABLE: 0.0})))


def test_codecs_are_measured_on_this_host_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run", healthy(bytes_per_second=10e6, ranks=2))
    assert run(["diagnose", str(path), "--measure-codecs", "--json"]) == 0
    fixes = json.loads(capsys.readouterr().out)["findings"][0]["fixes"]
    basis = {fix["paste"].partition("codec=")[2].split(" ")[0]: fix["gain"]["basis"] for fix in fixes}
    assert not any("not counted" in text for text in basis.values())
    assert set(measure_codecs(PREDICTED, 2)) == set(PREDICTED), "all that are predicted can be measured"
    assert "as measured" in basis["int8"]


FIELDS = {
    "version", "name", "bound", "verdict", "confidence", "size", "steps", "steps_looked_at", "step_seconds",
    "parts", "hidden_seconds", "findings", "notes",
}  # fmt: skip
OF_FINDING = {
    "kind", "title", "seconds", "share", "ranks", "hosts", "phase", "evidence", "fixes", "confidence",
}  # fmt: skip


def test_the_fields_of_json_are_those_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = str(write_run(tmp_path / "late", healthy(extra={"backward": only(1, 0.05)})))
    fine = str(write_run(tmp_path / "fine", healthy()))
    assert run(["diagnose", late, "--json", "--fail-over", "0"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert set(told) == FIELDS
    assert set(told["findings"][0]) == OF_FINDING
    assert set(told["findings"][0]["fixes"][0]) == {"what", "paste", "gain", "changes"}
    assert set(told["findings"][0]["fixes"][0]["gain"]) == {"seconds", "basis"}
    page = (Path(__file__).parents[3] / "docs" / "check/slow.md").read_text()
    assert all(f"`{field}`" in page for field in FIELDS | OF_FINDING)
    assert run(["diagnose", fine, "--fail-over", "0"]) == 0, "no finding costs more than nothing"
    capsys.readouterr()
    assert run(["compare", fine, late, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {
        "version", "first", "second", "outcome", "verdict", "step", "sample", "parts", "loss", "plan",
        "environment", "promises", "predictions", "notes",
    }  # fmt: skip
    assert set(told["step"]) == {"name", "first", "second", "interval"}
    assert {part["name"] for part in told["parts"]} >= {"forward", "backward", "waiting"}
    changes = {part["name"]: part for part in told["parts"]}
    # Three ranks of four wait for the fourth, whose backward is 50 ms longer.
    for name, more in (("waiting", 0.0375), ("backward", 0.0125)):
        low, high = changes[name]["interval"]
        assert low <= changes[name]["second"] - changes[name]["first"] <= high
        assert changes[name]["second"] - changes[name]["first"] == pytest.approx(more, rel=0.15)
        assert low > 0
    low, high = changes["forward"]["interval"]
    assert low <= 0 <= high, "what did not change"


def test_a_loss_that_changed_is_certain(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", healthy())
    two = write_run(tmp_path / "two", healthy(loss=lambda step: 5.0 / step))
    change = compare(one, two).loss
    assert change is not None
    assert change.is_certain
    assert change.second / change.first == pytest.approx(1.25, rel=0.01)
    assert compare(one, two).outcome == "no difference", "of speed"
