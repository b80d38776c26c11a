"""`farandole test --device`: the engine on ranks, the notice of a device never tested, the real command."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import farandole as fd
from farandole.bench import device_test_worker as worker
from farandole.bench.codecs_check import FORMS, Subject
from farandole.bench.device_test_worker import check_engine
from farandole.comm import routes as device_route
from farandole.comm.codecs.packing import BFloat16
from farandole.comm.codecs.registry import make_codec
from farandole.core.vocabulary.codec_spec import CodecSpec
from tests.ranks.pool import ranks
from tests.ranks.test_device_engine import distributed, simulated
from tests.warm import run

CPU = torch.device("cpu")


class SimulatedSubject(Subject):
    """A simulated accelerator of this rank."""

    @contextmanager
    def use(self) -> Generator[None, None, None]:
        """See `Subject`."""
        with simulated():
            yield


def few(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """Let the engine be checked with these codecs alone: a simulated accelerator is slow."""
    monkeypatch.setattr(worker, "FORMS", tuple(form for form in FORMS if form.text in texts))


@pytest.mark.gate_cases("True")
@pytest.mark.parametrize("scaled", [False, True])
@ranks(2)
def test_the_engine_on_a_simulated_accelerator_is_as_on_the_cpu(
    scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, "int8", "topk:0.02,exact=true,momentum=0.5,clip_norm=1.0", "randomk:0.05", "powersgd:2")
    check = check_engine(SimulatedSubject(CPU), fd.init(), scaled=scaled)
    assert check.passed, check.answer
    assert check.answer == f"{3 if scaled else 4} codecs: as on the CPU, equal on all ranks"


@pytest.mark.gate_cases("False")
@pytest.mark.parametrize("scaled", [False, True])
@ranks(3)
def test_three_ranks(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, "int8", "sign")
    check = check_engine(SimulatedSubject(CPU), fd.init(), scaled=scaled)
    assert check.passed, check.answer


@pytest.mark.parametrize("scaled", [False, True])
@ranks(2)
def test_other_bits_on_one_rank_are_named_on_all(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, "bf16", "fp16")
    world = fd.init()

    class OneRankIsWrong(SimulatedSubject):
        @contextmanager
        def use(self) -> Generator[None, None, None]:
            def cut(self: BFloat16, values: torch.Tensor, packed: torch.Tensor, seed: int = 0) -> None:
                packed.view(torch.int16).copy_(values.view(torch.int32) >> 16)

            with super().use():
                if world.rank == 0:
                    yield
                    return
                with patch.object(BFloat16, "pack", cut):
                    yield

    check = check_engine(OneRankIsWrong(CPU), world, scaled=scaled)
    assert check.passed is False
    assert check.answer.startswith("codec bf16, rank 0: mean of step 0: ")
    assert 'codec = "none"' in check.remedy


@pytest.mark.parametrize("passed", [False, True])
@ranks(2)
def test_a_device_that_was_never_tested_is_named_once(passed: bool) -> None:
    world = fd.init()
    notices: list[str] = []
    make_codec(CodecSpec.parse("int8"))  # whose loops are tried on the CPU as it is
    with (
        simulated(),
        patch.object(device_route, "was_tested", lambda device: passed),
        patch.object(device_route, "write_notice", notices.append),
    ):
        distributed(fd.Plan(codec="int8"))
    expected = ["codecs on cpu: never tested here: farandole test --device cpu"]
    assert notices == ([] if passed or world.rank else expected)


@pytest.mark.full("further")
def test_the_command_on_the_cpu(tmp_path: Path) -> None:
    done = run(tmp_path, "test", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["passed"]
    by_name = {check["name"]: check for check in result["checks"]}
    assert {f"codec {form.text}" for form in FORMS} <= by_name.keys()
    assert by_name["engine on ranks"]["passed"] is None, "compared with itself it would prove nothing"
    assert by_name["versions"]["word"] == "measured"
    assert not list(tmp_path.iterdir())


def test_a_device_that_is_not_there_ends_the_command(tmp_path: Path) -> None:
    done = run(tmp_path, "test", "--device", "tpu")
    assert done.returncode == 2
    assert "--device tpu: torch " in done.stderr
    assert "sees " in done.stderr
