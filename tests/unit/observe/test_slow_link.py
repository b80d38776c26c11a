"""Which link is slow, by what the kernels counted of each way between hosts: virtual runs of known truth."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.core.link import LinkModel, fit_link
from farandole.core.step_model import BucketLoad
from farandole.core.vocabulary.events import LinkTraffic
from farandole.observe.diagnose import Diagnosis, diagnose, network, to_text
from farandole.observe.figures.step_parts import WireTime
from farandole.observe.records.rows import ExchangeRow, StepRow
from farandole.observe.report import content as report_run
from farandole.observe.report.content import table_of_links
from farandole.observe.report.page import write_report
from tests.unit.observe.synthetic import Machine, healthy, write_run

HOSTS = 4
FAST, SLOW = 1.25e9, 12.5e6
"""Bytes a second."""
Rates = Mapping[tuple[int, int], float]
"""Of ways between hosts, where they are not fast."""


def ring(rates: Rates, *, sent_bytes: float = 12e6, hosts: int = HOSTS) -> Machine:
    """Return a run whose ranks, one a host, send so much a second to the next one."""
    ways = {
        rank: [
            LinkTraffic(
                f"10.0.0.{rank}", f"10.0.0.{(rank + 1) % hosts}", int(sent_bytes),
                sent_bytes / rates.get((rank, (rank + 1) % hosts), FAST),
            )
        ]
        for rank in range(hosts)
    }  # fmt: skip
    return healthy(hosts=[f"h{i}" for i in range(hosts)], ranks=hosts, bytes_per_second=200e6, ways=ways)


def found(tmp_path: Path, machine: Machine) -> Diagnosis:
    return diagnose(write_run(tmp_path / "run", machine))


@pytest.mark.parametrize(
    ("rates", "hosts", "ranks"),
    [
        ({(0, 1): SLOW, (1, 2): SLOW}, ("h1",), (1,)),
        ({(3, 0): SLOW, (0, 1): 0.8 * SLOW}, ("h0",), (0,)),
        ({(0, 1): SLOW, (1, 2): SLOW, (2, 3): SLOW}, ("h1", "h2"), (1, 2)),
    ],
)
def test_a_host_at_an_end_of_slow_ways_only_is_named(
    rates: Rates, hosts: tuple[str, ...], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    diagnosis = found(tmp_path, ring(rates))
    first = diagnosis.findings[0]
    assert (first.kind, first.hosts, first.ranks) == ("slow-link", hosts, ranks), to_text(diagnosis)
    assert "100 Mbit/s" in first.evidence[0]
    assert "10 Gbit/s" in first.evidence[0]
    assert f"# on {', '.join(hosts)}" in first.fixes[0].paste
    assert first.fixes[0].gain is not None
    # At the rate of the others nothing of the exchange would be exposed but the last bucket.
    assert first.fixes[0].gain.seconds == pytest.approx(first.seconds, rel=0.05)


def test_buckets_that_share_the_wire_are_fitted_together() -> None:
    """One of 30 kB that leaves just before one of 4.9 MB takes as long, on a link of 100 Mbit/s."""
    buckets = [BucketLoad(nbytes, nbytes, 2, ready_seconds=0.0) for nbytes in (30e3, 4.9e6)]
    seconds = [0.226, 0.199]
    alone = fit_link([each.sent_bytes for each in buckets], [2, 2], seconds)
    assert alone is not None
    assert alone.bytes_per_second > 1e9, "no bytes are seen"
    assert network._hides_bytes(alone, buckets, seconds)
    together = fit_link(*network._points(buckets, seconds, [False, True]))
    assert together is not None
    assert together.bytes_per_second == pytest.approx(11.6e6, rel=0.01)
    few = [BucketLoad(nbytes, nbytes, 2, ready_seconds=0.0) for nbytes in (164.0, 4132.0)]
    assert not network._hides_bytes(LinkModel(math.inf, 1e-3), few, [2e-3, 2e-3]), "small ones cost rounds"


def test_small_buckets_on_a_slow_wire_cost_bytes() -> None:
    """In 8 bits: 200 kB and 12 kB together on 20 Mbit/s; no local network takes 16 ms for a round."""
    buckets = [BucketLoad(nbytes, nbytes, 2, ready_seconds=0.0) for nbytes in (200e3, 12e3)]
    seconds = [0.050, 0.033]
    alone = fit_link([each.sent_bytes for each in buckets], [2, 2], seconds)
    assert alone is not None
    assert network._hides_bytes(alone, buckets, seconds)
    together = fit_link(*network._points(buckets, seconds, [False, True]))
    assert together is not None
    assert together.bytes_per_second == pytest.approx(2.55e6, rel=0.01)


def test_bursts_have_no_rate(tmp_path: Path) -> None:
    """Exchanges of 100 kB leave in one burst of a shaper on one way, and not on the other."""
    for bucket_bytes, is_named in ((4_000_000, True), (100_000, False)):
        machine = replace(ring({(1, 0): SLOW}, hosts=2), bucket_bytes=(bucket_bytes,), bytes_per_second=1e6)
        kinds = {finding.kind for finding in found(tmp_path / str(bucket_bytes), machine).findings}
        assert ("slow-link" in kinds) == is_named, kinds


def test_links_of_an_emulated_run_are_measured_in_an_emulated_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ring({(1, 2): SLOW}))
    facts = json.loads((run / "run.json").read_text())
    network = "farandole emulate --hosts 4 --rate=1gbit --rate-between 1,2=100mbit"
    typed = f"{network} --set codec=int8 -- python t.py --rate 1"
    (run / "run.json").write_text(json.dumps({**facts, "typed_command": typed.split()}))
    paste = diagnose(run).findings[0].fixes[0].paste
    assert paste == f"{network} -- farandole doctor"


def test_buckets_of_like_size_are_fitted_by_their_bytes() -> None:
    """Two of about 1 MB on 100 Mbit/s, the larger of which happened to take less time."""
    buckets = [BucketLoad(nbytes, nbytes, 2, ready_seconds=0.0) for nbytes in (1.05e6, 1.6e6)]
    seconds = [0.112, 0.106]
    alone = fit_link([each.sent_bytes for each in buckets], [2, 2], seconds)
    assert alone is not None
    assert network._hides_bytes(alone, buckets, seconds)
    together = fit_link(*network._points(buckets, seconds, [False, False]))
    assert together is not None
    assert together.bytes_per_second == pytest.approx(12.2e6, rel=0.01)


def test_the_exchange_that_stands_for_a_step_is_waited_for_and_has_the_wire_to_itself() -> None:
    """A GAN: the critic's, the generator's, and the critic's once more, which travels beside it."""
    waits_and_spans = (
        ((0.01, 0.14), [(0.01, 0.14)]),
        ((0.18, 0.45), [(0.17, 0.44)]),
        ((0.45, 0.45003), [(0.15, 0.41)]),
    )
    exchanges = [ExchangeRow([], begin, end, 0) for (begin, end), _ in waits_and_spans]
    rows = [
        StepRow(step=0, begin_seconds=0.0, end_seconds=0.5, data_seconds=0.0, samples=1, exchanges=exchanges)
    ] * 2
    wires = [WireTime(spans, 0.0) for _, spans in waits_and_spans]
    assert network._typical([(rows, wires)] * 5) == -3
    alike = [WireTime([(0.1 * n, 0.1 * n + 0.09)], 0.0) for n in range(3)]
    each = [ExchangeRow([], 0.1 * n, 0.1 * n + 0.09, 0) for n in range(3)]
    rows = [StepRow(step=0, begin_seconds=0.0, end_seconds=0.5, data_seconds=0.0, samples=1, exchanges=each)] * 2
    assert network._typical([(rows, alike)]) == -1
    assert network._typical([]) == -1


def test_without_a_bandwidth_the_counters_tell_what_a_faster_link_saves(tmp_path: Path) -> None:
    machine = replace(
        ring({(0, 1): SLOW, (1, 2): SLOW}, hosts=3),
        latency_seconds=0.05,
        bytes_per_second=1e15,
        bucket_bytes=(4_000_000, 1_000_000),
    )
    first = found(tmp_path, machine).findings[0]
    assert "however many bytes" in first.evidence[1] or "no bandwidth can be told" in first.evidence[1]
    assert (first.kind, first.hosts) == ("slow-link", ("h1",))
    assert first.fixes[0].gain is not None
    assert first.fixes[0].gain.seconds == pytest.approx(0.99 * first.seconds)


def test_of_a_slow_direction_the_way_is_named(tmp_path: Path) -> None:
    diagnosis = found(tmp_path, ring({(1, 2): SLOW}))
    first = diagnosis.findings[0]
    assert (first.kind, first.hosts) == ("slow-link", ("h1", "h2")), to_text(diagnosis)
    assert first.title.startswith("the way from h1 to h2 is slower than the others: ")
    assert "doctor -H h1,h2" in first.fixes[0].paste


def test_between_two_hosts_one_direction_is_named(tmp_path: Path) -> None:
    diagnosis = found(tmp_path, ring({(1, 0): SLOW}, hosts=2))
    assert diagnosis.findings[0].title.startswith("the way from h1 to h0 is slower")


@pytest.mark.parametrize(
    "machine",
    [
        ring({}),
        ring({(0, 1): 0.6 * FAST, (2, 3): 0.7 * FAST}),
        ring({(i, (i + 1) % HOSTS): SLOW for i in range(HOSTS)}),
        ring({(0, 1): SLOW, (1, 2): SLOW}, sent_bytes=1e6),
        replace(ring({}), late_end={0: 0.05}),
        healthy(hosts=("a", "b", "c", "d"), bytes_per_second=200e6),
    ],
    ids=[
        "all fast",
        "somewhat unequal",
        "all slow",
        "slow but hardly used",
        "fast, but ends late",
        "nothing counted",
    ],
)
def test_no_link_is_named_where_none_differs_or_binds(machine: Machine, tmp_path: Path) -> None:
    diagnosis = found(tmp_path, machine)
    assert diagnosis.bound == "communication"
    assert [f.kind for f in diagnosis.findings] == ["communication"], to_text(diagnosis)


def test_ways_that_carry_little_or_lead_to_strangers_are_left_out(tmp_path: Path) -> None:
    machine = ring({})
    stranger = LinkTraffic("10.0.0.1", "192.168.7.7", 50_000_000, 1.0)
    control = LinkTraffic("10.0.0.1", "10.0.0.3", 200_000, 0.9)
    machine.ways[1].extend([stranger, control])  # type: ignore[attr-defined]
    diagnosis = found(tmp_path, machine)
    assert [f.kind for f in diagnosis.findings] == ["communication"], to_text(diagnosis)


def test_the_page_has_the_ways_the_slowest_first(tmp_path: Path) -> None:
    run = report_run.read(write_run(tmp_path / "run", ring({(0, 1): SLOW, (1, 2): 1.04 * SLOW})))
    table = table_of_links(run)
    assert table is not None
    # 12 MB a second: almost all the time at 12.5 MB/s, a hundredth of it at the others' rate.
    assert [row[:2] for row in table.rows[:2]] == [["h0", "h1"], ["h1", "h2"]]
    assert [row[3:] for row in table.rows] == [
        ["100 Mbit/s", "96.0%"],
        ["104 Mbit/s", "92.3%"],
        ["10 Gbit/s", "1.0%"],
        ["10 Gbit/s", "1.0%"],
    ]
    assert "Ways between hosts" in write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert table_of_links(report_run.read(write_run(tmp_path / "other", healthy()))) is None


def test_a_slower_way_is_not_named_where_its_rate_hardly_matters(tmp_path: Path) -> None:
    # Two thirds of the exchange are its rounds: at the others' rate it would hardly be shorter.
    rates = {(0, 1): 130e6, (1, 2): 300e6, (2, 3): 300e6, (3, 0): 300e6}
    machine = replace(
        ring(rates, sent_bytes=100e6), bytes_per_second=600e6, latency_seconds=0.010,
        bucket_bytes=(2_000_000, 6_000_000) * 4,
    )  # fmt: skip
    diagnosis = found(tmp_path, machine)
    assert diagnosis.bound == "communication"
    assert "slow-link" not in {finding.kind for finding in diagnosis.findings}, to_text(diagnosis)
