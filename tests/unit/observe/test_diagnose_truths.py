"""Known truths: virtual runs with a fault each. The verdict names cause and rank, and the cost within 15 %."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farandole.core.step_model import divide_samples, longest_seconds
from farandole.observe.diagnose import KINDS, Diagnosis, diagnose, to_text
from farandole.observe.diagnose.finding import Fix
from tests.unit.observe.synthetic import Machine, every, healthy, only, write_run

TWO_HOSTS = ("a", "b")
HOUR = 3600.0
TIRED: Mapping[str, Any] = {"process_cores": 0.62, "machine_share": 0.99, "preemptions": 300}
RESTED: Mapping[str, Any] = {"process_cores": 1.0, "machine_share": 0.5, "preemptions": 2}
ASLEEP: Mapping[str, Any] = {"process_cores": 0.05, "machine_share": 0.1, "preemptions": 1}
IDLE_DEVICE: Mapping[str, Any] = {"process_cores": 1.0, "gpu_share": 0.3}


@dataclass(frozen=True)
class Truth:
    """A fault, and what must be said about it. The cost in seconds a step."""

    machine: Machine
    kind: str
    bound: str
    cost: float
    ranks: tuple[int, ...] = ()
    phase: str | None = None


def words(rank: int, step: int) -> int:
    """Return how many tokens a rank has in a step: sentences of all lengths."""
    return random.Random(rank * 1000 + step).randrange(200, 1400)


def unequal(rank: int, step: int) -> float:
    return 0.0001 * words(rank, step)


EXTRA_WORDS = (
    sum(max(unequal(r, s) for r in range(4)) - sum(unequal(r, s) for r in range(4)) / 4 for s in range(7, 61)) / 54
)

SLOW_LINK = 0.0075 + 8 * (6e6 / 200e6 + 2 * 20e-6) - 0.060
"""First bucket ready after 7.5 ms of a backward of 60; then 8 buckets of 6 MB one after the other."""

TRUTHS = {
    "backward": Truth(
        healthy(extra={"backward": only(1, 0.05)}),
        "straggler",
        "straggler",
        0.05,
        (1,),
        "backward",
    ),
    "forward": Truth(healthy(extra={"forward": only(2, 0.03)}), "straggler", "straggler", 0.03, (2,), "forward"),
    "one loader": Truth(healthy(extra={"data": only(3, 0.04)}), "straggler", "straggler", 0.04, (3,), "data"),
    "optimizer": Truth(
        healthy(extra={"optimizer": only(0, 0.025)}),
        "straggler",
        "straggler",
        0.025,
        (0,),
        "optimizer",
    ),
    "two ranks": Truth(
        healthy(ranks=2, extra={"forward": only(1, 0.02)}),
        "straggler",
        "straggler",
        0.02,
        (1,),
        "forward",
    ),
    "backward of a wrapper that waits inside": Truth(
        healthy(extra={"backward": only(1, 0.05)}, blocks_in_backward=True),
        "straggler",
        "straggler",
        0.05,
        (1,),
        "backward",
    ),
    "clocks an hour apart": Truth(
        healthy(
            hosts=TWO_HOSTS,
            clock_offsets={"b": HOUR},
            drift=5e-5,
            extra={"backward": only(1, 0.05)},
            sample={2: {}},
        ),
        "straggler",
        "straggler",
        0.05,
        (1,),
        "backward",
    ),
    "clocks an hour apart and nobody compared them": Truth(
        healthy(
            hosts=TWO_HOSTS, clock_offsets={"b": -HOUR}, tells_offsets=False, extra={"backward": only(3, 0.05)}
        ),
        "straggler",
        "straggler",
        0.05,
        (3,),
        "backward",
    ),
    "one slow host": Truth(
        healthy(hosts=TWO_HOSTS, extra={"backward": lambda rank, step: 0.04 if rank >= 2 else 0.0}),
        "straggler",
        "straggler",
        0.04,
        (2, 3),
        "backward",
    ),
    "input": Truth(healthy(extra={"data": lambda rank, step: 0.06}), "input", "input", 0.0605, (), "data"),
    "input of one process": Truth(
        healthy(ranks=1, extra={"data": lambda rank, step: 0.06}), "input", "input", 0.0605, (), "data"
    ),
    "slow link": Truth(
        healthy(bytes_per_second=200e6),
        "communication",
        "communication",
        SLOW_LINK,
        (),
        "exchange",
    ),
    "slow link that buckets share": Truth(
        healthy(bytes_per_second=200e6, side_by_side=True),
        "communication",
        "communication",
        SLOW_LINK,  # a link that is never idle is done as soon, in whichever order
        (),
        "exchange",
    ),
    "slow link, clocks apart": Truth(
        healthy(bytes_per_second=200e6, hosts=TWO_HOSTS, clock_offsets={"b": HOUR}, tells_offsets=False),
        "communication",
        "communication",
        SLOW_LINK,
        (),
        "exchange",
    ),
    "small buckets": Truth(
        healthy(bucket_bytes=(*(125_000,) * 255, 40_000), latency_seconds=500e-6),
        "small-buckets",
        "communication",
        256 * (0.001 + 187_500 / 10e9) - 0.060,
        (),
        "exchange",
    ),
    "one large bucket": Truth(
        healthy(bucket_bytes=(100_000_000,), bytes_per_second=4e9),
        "large-buckets",
        "communication",
        150e6 / 4e9,
        (),
        "exchange",
    ),
    "an exchange after each of four backward passes": Truth(
        healthy(exchanges=4, bytes_per_second=500e6),
        "extra-exchange",
        "communication",
        3 * (0.0075 + 8 * 0.01204 - 0.060),
    ),
    "three times the bytes": Truth(
        healthy(sent_factor=3.0, bytes_per_second=400e6),
        "extra-exchange",
        "communication",
        (0.0075 + 8 * (18e6 / 400e6) - 0.060) * 2 / 3,
    ),
    "one slow link of three": Truth(
        healthy(ranks=3, hosts=("a", "b", "c"), late_end={2: 0.03}),
        "slow-link",
        "communication",
        0.0307,
        (2,),
    ),
    "garbage collection on one rank at a time": Truth(
        healthy(extra={"garbage collection": lambda rank, step: 0.02 if step % 4 == rank else 0.0}),
        "gc",
        "pauses",
        0.02,
    ),
    "checkpoint of rank 0": Truth(
        healthy(steps=106, extra={"checkpoint": every(20, 0.5, 0)}),
        "pause",
        "pauses",
        0.5 * 5 / 96,
        (0,),
        "checkpoint",
    ),
    "evaluation on all": Truth(
        healthy(steps=106, extra={"evaluation": every(10, 0.3)}), "pause", "pauses", 0.3 * 9 / 96, (), "evaluation"
    ),
    "a phase of the user's": Truth(
        healthy(extra={"plotting": only(1, 0.04)}), "pause", "pauses", 0.04, (1,), "plotting"
    ),
    "spikes": Truth(
        healthy(steps=106, extra={"forward": every(10, 0.3, 1)}),
        "irregular",
        "pauses",
        0.3 * 9 / 96,
        (1,),
        "forward",
    ),
    "slow start": Truth(healthy(first_step_factor=10.0), "warm-up", "compute", 3 * 9 * 0.097 / 60),
    "more samples": Truth(
        healthy(
            samples=lambda rank, step: 12 if rank == 2 else 8,
            extra={"forward": only(2, 0.015), "backward": only(2, 0.030)},
        ),
        "samples",
        "straggler",
        0.045,
        (2,),
    ),
    "sentences of all lengths": Truth(
        healthy(tokens=words, extra={"forward": unequal}), "samples", "straggler", EXTRA_WORDS
    ),
    "a shared core": Truth(
        healthy(steps=150, extra={"backward": only(1, 0.05)}, sample={0: RESTED, 1: TIRED, 2: RESTED, 3: RESTED}),
        "oversubscribed",
        "straggler",
        0.05,
        (1,),
        "backward",
    ),
    "a shared core, by the kernel's account": Truth(
        healthy(
            steps=150,
            extra={"backward": only(1, 0.05)},
            sample={1: {**TIRED, "core_wait_share": 0.33}, 0: {**TIRED, "core_wait_share": 0.01}},
        ),
        "oversubscribed",
        "straggler",
        0.05,
        (1,),
        "backward",
    ),
    "all cores are shared": Truth(
        healthy(steps=150, sample=dict.fromkeys(range(4), TIRED)),
        "oversubscribed",
        "compute",
        0.0965 - 0.62 * 0.0985,
        (0, 1, 2, 3),
    ),
    "swapping": Truth(
        healthy(
            steps=150,
            extra={"forward": only(1, 0.06)},
            sample={
                1: {"process_cores": 0.55, "machine_share": 0.4, "swapped_bytes": 50_000_000, "major_faults": 900}
            },
        ),
        "memory",
        "memory",
        0.06,
        (1,),
        "forward",
    ),
    "an accelerator that waits for launches": Truth(
        healthy(steps=150, sample=dict.fromkeys(range(4), IDLE_DEVICE)),
        "launch",
        "launch",
        0.0965 - 0.3 * 0.0985,
    ),
}


def diagnose_machine(directory: Path, machine: Machine) -> Diagnosis:
    return diagnose(write_run(directory / "run", machine))


@pytest.mark.gate_cases("input of one process", "one slow link of three")
@pytest.mark.parametrize("name", TRUTHS)
def test_the_cause_the_rank_and_the_cost(name: str, tmp_path: Path) -> None:
    truth = TRUTHS[name]
    found = diagnose_machine(tmp_path, truth.machine)
    text = to_text(found)
    assert found.findings, text
    first = found.findings[0]
    assert (first.kind, first.ranks) == (truth.kind, truth.ranks), text
    assert truth.phase is None or first.phase == truth.phase, text
    assert first.seconds == pytest.approx(truth.cost, rel=0.15), text
    for finding in found.findings:
        assert finding.share == pytest.approx(finding.seconds / (found.step_seconds or 0.0), rel=1e-6)
    assert found.bound == truth.bound
    assert first.title.split(":")[0] in found.verdict
    assert first.kind in KINDS
    assert first.fixes, "what to do"
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds)
    for rank in truth.ranks:
        assert str(rank) in first.title or first.kind in ("pause", "irregular")
    # Nothing that isn't there is found beside it: the rest costs less than a tenth of it.
    others = [f for f in found.findings[1:] if f.kind not in ("communication", truth.kind)]
    assert all(f.seconds < 0.1 * first.seconds for f in others), text
    together = sum(f.seconds for f in found.findings if f.kind != "warm-up")
    assert together <= 1.001 * (found.step_seconds or 0.0), "no second is in two costs"
    assert max(len(line) for line in text.splitlines()) <= 100
    assert len(text.splitlines()) <= 45


def test_two_stragglers_are_both_named(tmp_path: Path) -> None:
    machine = healthy(extra={"backward": only(1, 0.05), "data": only(3, 0.02)})
    first, second = diagnose_machine(tmp_path, machine).findings
    assert (first.ranks, first.phase) == ((1,), "backward")
    assert first.seconds == pytest.approx(0.03, rel=0.15), "then rank 3 is the slowest"
    assert (second.ranks, second.phase) == ((3,), "data")
    assert second.seconds == pytest.approx(0.02, rel=0.15)


def test_a_full_accelerator(tmp_path: Path) -> None:
    full = {"process_cores": 1.0, "gpu_share": 0.9, "gpu_used_bytes": 99, "gpu_total_bytes": 100}
    machine = healthy(steps=150, extra={"forward": every(10, 0.4, 1)}, sample={1: full})
    found = diagnose_machine(tmp_path, machine)
    memory = [finding for finding in found.findings if finding.kind == "memory"]
    assert memory
    assert memory[0].ranks == (1,)
    assert "expandable_segments" in memory[0].fixes[0].paste


def test_a_rank_that_sleeps_on_a_busy_machine_is_slow_but_its_core_is_free(tmp_path: Path) -> None:
    asleep = {**ASLEEP, "machine_share": 1.0, "preemptions": 100, "core_wait_share": 0.02}
    machine = healthy(steps=150, extra={"backward": only(1, 0.05)}, sample=dict.fromkeys(range(4), asleep))
    assert [finding.kind for finding in diagnose_machine(tmp_path, machine).findings] == ["straggler"]


def test_a_rank_that_sleeps_is_slow_but_its_core_is_not_shared(tmp_path: Path) -> None:
    machine = healthy(steps=150, extra={"backward": only(1, 0.05)}, sample=dict.fromkeys(range(4), ASLEEP))
    assert [finding.kind for finding in diagnose_machine(tmp_path, machine).findings] == ["straggler"]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    noise=st.floats(0, 0.04), ranks=st.integers(1, 6), steps=st.integers(12, 60), seed=st.integers(0, 10_000),
    drift=st.floats(-1e-4, 1e-4), blocks=st.booleans(),
)  # fmt: skip
def test_no_false_alarm(
    noise: float,
    ranks: int,
    steps: int,
    seed: int,
    drift: float,
    blocks: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    machine = healthy(
        noise=noise, ranks=ranks, steps=steps, seed=seed, hosts=TWO_HOSTS[:ranks], drift=drift,
        clock_offsets={"b": 100.0}, blocks_in_backward=blocks, sample=dict.fromkeys(range(ranks), RESTED),
    )  # fmt: skip
    found = diagnose_machine(tmp_path_factory.mktemp("healthy"), machine)
    assert found.bound == "compute", to_text(found)
    assert found.findings == (), to_text(found)


@settings(max_examples=10, deadline=None)
@given(
    noise=st.floats(0, 0.04), rank=st.integers(0, 3), seconds=st.floats(0.02, 0.2), seed=st.integers(0, 10_000),
    phase=st.sampled_from(["data", "forward", "backward", "optimizer"]),
)  # fmt: skip
def test_a_straggler_is_found_through_noise(
    noise: float, rank: int, seconds: float, seed: int, phase: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    machine = healthy(noise=noise, seed=seed, extra={phase: only(rank, seconds)}, steps=40)
    found = diagnose_machine(tmp_path_factory.mktemp("late"), machine)
    first = found.findings[0]
    assert (first.kind, first.ranks, first.phase) == ("straggler", (rank,), phase)
    # What noise costs anyway, some milliseconds, nobody gets back.
    assert first.seconds == pytest.approx(seconds, rel=0.15, abs=0.1 * noise)


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(("codec", "sent_factor"), [("int8", 0.254), ("bf16", 0.5)])
def test_the_predicted_gain_of_a_codec_is_what_it_gains(
    codec: str, sent_factor: float, side_by_side: bool, tmp_path: Path
) -> None:
    """Beside another virtual run with that codec, and by hand: buckets of 6 MB on a link that is never idle."""
    before = healthy(bytes_per_second=200e6, side_by_side=side_by_side)
    then = replace(before, plan={"codec": codec}, sent_factor=sent_factor)
    one = diagnose_machine(tmp_path / "before", before)
    two = diagnose_machine(tmp_path / "after", then)
    assert one.step_seconds is not None
    assert two.step_seconds is not None
    gain = next(f.gain for f in one.findings[0].fixes if f"codec={codec}" in f.paste)
    assert gain is not None
    assert gain.seconds == pytest.approx(one.step_seconds - two.step_seconds, rel=0.15)
    assert gain.seconds == pytest.approx(8 * 6e6 * (1 - sent_factor) / 200e6, rel=0.15)
    assert "bandwidth" in gain.basis


@pytest.mark.gate_cases("small buckets")
@pytest.mark.parametrize("name", ["small buckets", "one large bucket"])
def test_the_predicted_gain_of_a_bucket_size_is_what_it_gains(name: str, tmp_path: Path) -> None:
    before = TRUTHS[name].machine
    found = diagnose_machine(tmp_path / "before", before)
    best = found.findings[0].fixes[0]
    assert best.gain is not None
    assert "bucket_bytes=" in best.paste
    size = int(best.paste.partition("bucket_bytes=")[2].partition("MiB")[0]) * 2**20
    total = sum(before.bucket_bytes)
    count = max(1, round(total / size))
    then = diagnose_machine(
        tmp_path / "after",
        healthy(
            bucket_bytes=(total // count,) * count, latency_seconds=before.latency_seconds,
            bytes_per_second=before.bytes_per_second,
        ),
    )  # fmt: skip
    assert found.step_seconds is not None
    assert then.step_seconds is not None
    assert best.gain.seconds == pytest.approx(found.step_seconds - then.step_seconds, rel=0.15)


@pytest.mark.parametrize("apart", [False, True])
def test_what_hides_behind_computing_is_what_was_on_the_wire_before_its_end(apart: bool, tmp_path: Path) -> None:
    # Eight buckets of 15 ms become ready every 7.5 ms of a backward pass of 60 ms: one after the other they are on
    # the wire from 7.5 to 127.5 ms.
    clocks: dict[str, Any] = {"hosts": ("a", "b"), "clock_offsets": {"b": 3600.0}, "tells_offsets": False}
    machine = healthy(bytes_per_second=400e6, latency_seconds=0.0, noise=0.0, **(clocks if apart else {}))
    found = diagnose_machine(tmp_path, machine)
    assert found.hidden_seconds == pytest.approx(0.0525, rel=0.01)
    assert found.findings[0].seconds == pytest.approx(0.0675, rel=0.01)
    line = found.findings[0].evidence[-1]
    assert "busy for 120 ms a step, 52.5 ms of it behind computing" in line


@pytest.mark.parametrize(
    ("used", "stall", "route", "codec", "paste"),
    [
        # gloo's connections are made before a plan is known; our own need no root.
        ("bbr", 0.4, "flat", "none", "sysctl -w net.ipv4.tcp_congestion_control=cubic"),
        ("bbr", 0.4, "flat", "bf16", "farandole run -np 4 --set congestion_control=cubic"),
        ("bbr", 0.0, "flat", "none", ""),
        ("cubic", 0.4, "flat", "none", ""),
        ("bbr", 0.4, "shared", "none", ""),
    ],
)
def test_long_exchanges_under_a_paced_tcp_have_a_fix_of_their_own(
    used: str, stall: float, route: str, codec: str, paste: str, tmp_path: Path
) -> None:
    machine = healthy(
        bytes_per_second=400e6, congestion_control=used, stall=every(10, stall), route=route, plan={"codec": codec}
    )
    fixes = diagnose_machine(tmp_path, machine).findings[0].fixes
    asked = [fix for fix in fixes if "congestion_control=cubic" in fix.paste]
    assert [fix.paste.startswith(paste) for fix in asked] == [True] * bool(paste)
    if paste:
        assert asked[0].gain is not None
        assert asked[0].gain.seconds == pytest.approx(0.04, rel=0.15)


def test_a_slow_start_comes_after_what_binds_the_steps_and_says_what_it_does(tmp_path: Path) -> None:
    machine = healthy(first_step_factor=30.0, extra={"data": lambda rank, step: 0.06})
    found = diagnose_machine(tmp_path, machine)
    assert [finding.kind for finding in found.findings] == ["input", "warm-up"]
    assert found.bound == "input"
    start = found.findings[1]
    assert start.seconds > found.findings[0].seconds
    assert any("step 1 takes" in line and "of it backward" in line for line in start.evidence)


def test_a_rank_that_is_slow_by_itself_where_all_lack_cores_is_a_straggler(tmp_path: Path) -> None:
    tired = {**TIRED, "core_wait_share": 0.25}
    machine = healthy(steps=150, extra={"backward": only(2, 0.05)}, sample=dict.fromkeys(range(4), tired))
    first, second = diagnose_machine(tmp_path, machine).findings[:2]
    assert (first.kind, first.ranks, first.phase) == ("straggler", (2,), "backward")
    assert (second.kind, second.ranks) == ("oversubscribed", (0, 1, 3))


def test_one_process_that_lacks_a_core_is_no_straggler_and_has_no_exchange(tmp_path: Path) -> None:
    tired = {**TIRED, "core_wait_share": 0.6}
    found = diagnose_machine(tmp_path, healthy(ranks=1, steps=150, sample={0: tired}))
    assert found.findings[0].kind == "oversubscribed"
    assert found.bound == "compute"
    assert found.verdict.startswith("Compute-bound, and short of cores: rank 0 is sharing a core")
    assert "rank 0 was ready" in found.findings[0].evidence[0]
    assert "exchange" not in found.findings[0].evidence[0]


def test_what_a_plan_cannot_change_is_not_promised_without_our_engine(tmp_path: Path) -> None:
    ours = diagnose_machine(tmp_path / "ours", healthy(bytes_per_second=200e6, plan={"accumulate": 4}))
    theirs = diagnose_machine(tmp_path / "theirs", healthy(bytes_per_second=200e6, route=None))
    pastes = [[fix.paste for fix in found.findings[0].fixes if fix.changes] for found in (ours, theirs)]
    assert all(paste.startswith("farandole run -np 4 --set") for paste in pastes[0])
    call = "model, optimizer = fd.distribute(model, optimizer, fd.Plan("
    where_ours = f"fd.init()  # instead of DistributedDataParallel\n{call}"
    assert all(where_ours in paste or paste.startswith("bucket_cap_mb=") for paste in pastes[1])
    assert not any("farandole run" in paste for paste in pastes[1]), "no box has lines of Python and of a shell"
    assert max(len(line) for line in to_text(theirs).splitlines()) <= 100


def test_a_diagnosis_of_many_faults_fits_one_screen(tmp_path: Path) -> None:
    # A straggler, slow data, a slow network, a collector and a checkpoint, with several fixes each, and notes.
    many = healthy(
        bytes_per_second=200e6, steps=90, hosts=("a", "b"), clock_offsets={"b": 3600.0}, tells_offsets=False,
        extra={
            "backward": only(2, 0.05), "data": lambda rank, step: 0.04, "garbage collection": every(5, 0.2),
            "checkpoint": every(10, 0.5),
        },
    )  # fmt: skip
    found = diagnose_machine(tmp_path, many)
    assert len(found.findings) >= 4
    lines = to_text(found).splitlines()
    assert len(lines) <= 40, "\n".join(lines)
    assert sum(line.startswith("   fix: ") for line in lines) >= 3
    assert any("more finding" in line for line in lines)
    assert lines[-1].startswith(("note: ", "      "))


def slow_by_samples(**changes: Any) -> Machine:
    """Return a machine whose rank 1 computes half as fast."""
    return healthy(extra={"forward": only(1, 0.030), "backward": only(1, 0.060)}, **changes)


def shares_fix(found: Diagnosis) -> Fix | None:
    return next((fix for fix in found.findings[0].fixes if "balance=speed" in fix.paste), None)


def test_shares_by_speed_are_proposed_with_what_they_gain(tmp_path: Path) -> None:
    machine = slow_by_samples()
    found = diagnose_machine(tmp_path / "equal", machine)
    fix = shares_fix(found)
    assert fix is not None, to_text(found)
    assert fix.gain is not None
    speeds = [8 / 0.090] * machine.ranks
    speeds[1] /= 2
    counts = divide_samples(8 * machine.ranks, tuple(speeds))
    expected = 0.180 - longest_seconds(counts, speeds)
    assert fix.gain.seconds == pytest.approx(expected, rel=0.1)
    shown = fix.gain.basis.removeprefix("samples by rank ").partition(":")[0].split()
    assert sum(map(int, shown)) == 8 * machine.ranks
    assert int(shown[1]) in (4, 5), "half as many as the others, of which one has one more"


@pytest.mark.parametrize(
    "machine",
    [
        slow_by_samples(setup={"sample_shares": "9 5 9 9"}),
        slow_by_samples(plan={"balance": "speed"}),
        slow_by_samples(plan={"balance": "2,1,2,2"}),
        slow_by_samples(plan={"sync_batch_norm": True}),
        slow_by_samples(setup={"replicas": 2}),
        slow_by_samples(setup={"device": "cuda"}),
        slow_by_samples(setup={"zero": 3}),
        slow_by_samples(route=None),
        healthy(extra={"data": only(1, 0.05)}),
        healthy(extra={"optimizer": only(1, 0.05)}),
    ],
    ids=[
        "on",
        "in the plan",
        "listed",
        "batch norm",
        "a mesh",
        "a GPU",
        "stage 3",
        "DDP",
        "a loader",
        "an optimizer",
    ],
)
def test_shares_by_speed_are_not_proposed(machine: Machine, tmp_path: Path) -> None:
    found = diagnose_machine(tmp_path, machine)
    assert found.findings
    assert shares_fix(found) is None, to_text(found)
