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
from farandole.bench.device_test import checks
from farandole.bench.device_test.forms import FORMS
from farandole.bench.device_test.subject import Subject
from farandole.comm.codecs.packing import BFloat16
from farandole.comm.codecs.registry import make_codec
from farandole.comm.routes import device_route
from farandole.core.vocabulary.codec_spec import CodecSpec
from tests.ranks.pool import ranks
from tests.ranks.test_device_engine import distributed, simulated
from tests.warm import run

CPU = torch.device("cpu")


class SimulatedSubject(Subject):
    """A simulated accelerator of this rank. `left_out`: see `SimulatedDevice`."""

    left_out: tuple[str, ...] = ()

    @contextmanager
    def use(self) -> Generator[None, None, None]:
        """See `Subject`."""
        with simulated(*self.left_out):
            yield


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("text", [form.text for form in FORMS])
@ranks(2)
def test_the_engine_on_a_simulated_accelerator_is_as_one_process(text: str, scaled: bool) -> None:
    world = fd.init()
    with patch.object(checks, "FORMS", tuple(form for form in FORMS if form.text == text)):
        check = checks.check_engine(SimulatedSubject(CPU), world, scaled=scaled)
    assert check.passed, check.answer


@ranks(3)
def test_the_engine_on_three_ranks_of_the_cpu() -> None:
    world = fd.init()
    with patch.object(checks, "FORMS", tuple(form for form in FORMS if form.text in ("int8", "sign"))):
        for scaled in (False, True):
            check = checks.check_engine(Subject(CPU), world, scaled=scaled)
            assert check.passed, check.answer


@pytest.mark.parametrize("scaled", [False, True])
@ranks(2)
def test_other_bits_on_one_rank_are_named_on_all(scaled: bool) -> None:
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

    with patch.object(checks, "FORMS", tuple(form for form in FORMS if form.text in ("bf16", "fp16"))):
        check = checks.check_engine(OneRankIsWrong(CPU), world, scaled=scaled)
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


def test_the_command_on_the_cpu(tmp_path: Path) -> None:
    done = run(tmp_path, "test", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["passed"]
    by_name = {check["name"]: check for check in result["checks"]}
    assert {f"codec {form.text}" for form in FORMS} <= by_name.keys()
    assert by_name["engine on 2 ranks"]["passed"]
    assert by_name["engine on 2 ranks"]["answer"] == f"{len(FORMS)} codecs: as one process on the CPU"
    assert by_name["streams under load"]["passed"] is None
    assert by_name["versions"]["word"] == "measured"
    assert not list(tmp_path.iterdir())


def test_a_device_that_is_not_there_ends_the_command(tmp_path: Path) -> None:
    done = run(tmp_path, "test", "--device", "tpu")
    assert done.returncode == 2
    assert "--device tpu: torch " in done.stderr
    assert "sees " in done.stderr
