"""Buckets of gradients in the timeline of named operations."""

from __future__ import annotations

import time
from pathlib import Path

from farandole.core.vocabulary.events import DataWait, Exchange
from farandole.observe.export.operation_timeline import BucketTimeline, OperationTimeline, lane_name
from tests import trace_format


def test_every_bucket_is_a_lane_and_the_exchange_shows_its_wait(tmp_path: Path) -> None:
    log = OperationTimeline(0, 2)
    log.start(tmp_path / "t.json")
    now = time.monotonic()
    buckets = BucketTimeline(log, lambda: [["fc.weight", "fc.bias"], ["conv.weight"]])
    for step in range(3):
        begin = now + step
        buckets.record(DataWait(begin, begin + 0.05, 8))
        buckets.record(Exchange((begin + 0.1, begin + 0.2), begin + 0.3, begin + 0.5, 4096))
    buckets.record(Exchange((), now + 3, now + 3, 0))
    log.stop()
    events = trace_format.check(tmp_path / "t.json")
    whole = "gradients: fc.weight, fc.bias, conv.weight"
    assert list(trace_format.names(events)) == [whole, "bucket 0: fc.weight, fc.bias", "bucket 1: conv.weight"]

    def spans(name: str) -> list[tuple[str, float]]:
        """Seconds of each span of a lane, in the order of their ends."""
        done, open_spans = [], []
        for event in trace_format.lane(events, name):
            if event["ph"] == "B":
                open_spans.append(event)
            else:
                begun = open_spans.pop()
                done.append((begun["name"], round((event["ts"] - begun["ts"]) / 1e6, 3)))
        return done

    assert spans(whole) == [("WAIT", 0.2), ("ALLREDUCE", 0.4)] * 3
    assert spans("bucket 0: fc.weight, fc.bias") == [("ALLREDUCE", 0.4)] * 3
    assert spans("bucket 1: conv.weight") == [("ALLREDUCE", 0.3)] * 3


def test_a_bucket_whose_parameters_are_not_known_has_its_number() -> None:
    assert lane_name("bucket 3", ()) == "bucket 3"
    assert lane_name("bucket 0", "abc") == "bucket 0: a, b, c"
    assert lane_name("bucket 0", "abcde") == "bucket 0: a, b, c and 2 more"
