"""`farandole test`: how it judges, what it reads, and that a wrong collective is a fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farandole.bench import cluster_test_worker as worker
from farandole.bench.cluster_test import Proof, check_rate
from farandole.bench.cluster_test_worker import KINDS, SIZES, CollectiveCase, cases, check, inputs
from farandole.bench.launch_ranks import account_of, read_message
from farandole.cli.commands.cluster_test import make_parser, page, run_words
from farandole.cli.options.host_options import with_slots

OK = {"name": "collectives", "passed": True, "answer": "12 exchanges", "remedy": ""}
BAD = {"name": "training", "passed": False, "answer": "loss went up", "remedy": "look"}
OPEN = {"name": "buffers", "passed": None, "answer": "there are none", "remedy": ""}


@pytest.mark.parametrize(
    ("checks", "failure", "word"),
    [
        ([OK, OPEN], (), "PASSED"),
        ([OK, BAD], (), "FAILED"),
        ([], (), "FAILED"),
        ([OK], ("rank 1 failed",), "FAILED"),
    ],
)
def test_the_last_word(checks: list[dict[str, Any]], failure: tuple[str, ...], word: str) -> None:
    proof = Proof(checks, 2, 2, failure=failure)
    assert page(proof).splitlines()[-1] == word
    assert proof.to_mapping()["passed"] is (word == "PASSED")


@pytest.mark.parametrize(
    ("rate", "expected", "shared", "passed"),
    [
        (500e6, 1e9, False, True),
        (499e6, 1e9, False, False),
        (499e6, 1e9, True, False),
        (1e9, 10e9, False, False),
        (1e9, 10e9, True, None),
        (None, 1e9, False, None),
        (1e9, None, False, None),
    ],
)
def test_a_rate_is_judged_by_the_weakest_link(
    rate: float | None, expected: float | None, shared: bool, passed: bool | None
) -> None:
    judged = check_rate(rate, expected, shared_cores=shared)
    assert judged["passed"] is passed
    assert bool(judged["remedy"]) is (passed is False)


def test_only_rank_0_is_read() -> None:
    assert read_message('[0] {"progress": "x"}\n') == {"progress": "x"}
    for line in ('[1] {"progress": "x"}', '[0] {"other": 1}', "[0] {broken}", '[0] ["progress"]', "hello"):
        assert read_message(line) is None


def test_the_account_of_a_failure_begins_with_its_cause() -> None:
    said = ["noise", "farandole: rank 1 on b failed after step 0: boom", "  Traceback", "farandole: exit code 1"]
    assert account_of(1, said) == ("rank 1 on b failed after step 0: boom", "  Traceback", "exit code 1")
    assert account_of(1, ["one", "two"]) == ("one", "two")
    assert account_of(-9, []) == ("the job ended with exit code -9, and printed nothing",)


def test_every_kind_and_size_is_tried_small_ones_first() -> None:
    found = list(cases(4))
    assert {case.kind for case in found} == set(KINDS)
    assert [case.elements for case in found] == sorted(case.elements for case in found)
    assert {case.elements for case in found} == set(SIZES)
    assert all(str(case) for case in found)


@pytest.mark.parametrize("size", [2, 64, 85, 86, 300])
def test_inputs_can_be_added_up_exactly(size: int) -> None:
    for case in cases(size):
        if case.elements == 1000 and "sum" in case.kind:
            rows = inputs(case, size, torch.device("cpu"))
            exact = rows.to(torch.int64).sum(0)
            assert torch.equal(exact.to(case.dtype).to(torch.int64), exact), case


def test_a_wrong_exchange_is_a_fault_that_names_the_element(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(rows: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        received = rows[0].clone()
        received[17] += 1
        return received, rows[0]

    monkeypatch.setitem(worker.KINDS, "broadcast", spoilt)
    world: Any = SimpleNamespace(group=object(), device=torch.device("cpu"), size=2, rank=0)
    fault = check(CollectiveCase("broadcast", torch.float32, 1000), world, {})
    assert fault.startswith("broadcast of 1,000 float32: 1 of 1000 numbers are wrong, the first is element 17")


@pytest.mark.parametrize(
    ("text", "slots"),
    [("a,b", "a:1,b:1"), ("a:2, b", "a:2,b:1"), ("[fe80::1],c", "[fe80::1]:1,c:1"), ("a,,b", "a:1,,b:1")],
)
def test_a_bare_host_takes_one_rank(text: str, slots: str) -> None:
    assert with_slots(text) == slots


def test_the_job_is_placed_as_the_line_says() -> None:
    words = ["-np", "4", "-H", "a,b:3", "-p", "22", "-i", "key", "--ssh-option", "User=me", "--python", "py", "-x",
             "A=1", "--chdir", "d", "--prelude", "source x"]  # fmt: skip
    assert run_words(make_parser().parse_args(words)) == [
        "-np", "4", "-H", "a:1,b:3", "--ssh-port=22", "--ssh-identity-file=key", "--python=py", "--chdir=d",
        "--prelude=source x", "--ssh-option=User=me", "-x", "A=1",
    ]  # fmt: skip
    assert run_words(make_parser().parse_args([])) == []
