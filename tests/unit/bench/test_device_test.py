"""`farandole test --device` on a simulated accelerator: it passes, and what is wrong there fails by name."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from farandole.bench import cluster_test, codecs_check
from farandole.bench.codecs_check import (
    FORMS,
    OPERATIONS,
    Form,
    Subject,
    check_codec,
    describe,
    describe_rates,
    fault_of,
    find_devices,
    gradients_of,
    operations_with_other_bits,
    run_codec,
)
from farandole.bench.launch_ranks import FollowedJob
from farandole.cli.commands.cluster_test import main
from farandole.comm.codecs.packing import BFloat16, Integers
from farandole.comm.codecs.quantize import NativeQuantize
from farandole.comm.codecs.registry import runs_on_devices
from farandole.comm.device import tested
from farandole.comm.device.streams import simulate_device
from farandole.comm.world import connect
from farandole.core.env import nccl_host, share_device
from farandole.core.vocabulary.codec_spec import NONE, OPTIONS, CodecSpec
from farandole.core.vocabulary.errors import ConfigError
from tests.simulated_device import HOST, SIDE, SimulatedDevice
from tests.threads import one_thread

__all__ = ["one_thread"]

CPU = torch.device("cpu")


class WithHostCopies(SimulatedDevice):
    """A simulated device in which a copy to the CPU is over when it returns: memory may be let go then."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket.__name__ == "_to_copy" and (kwargs or {}).get("device") == CPU:
            over = self.record()
            for stream in (HOST, SIDE):
                self.arrive(stream, over)
        return result


@dataclass(frozen=True)
class SimulatedSubject(Subject):
    """A simulated accelerator."""

    device: torch.device = CPU
    wrong: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What is wrong with the device while it is in use."""

    @contextmanager
    def use(self) -> Generator[None, None, None]:
        device = WithHostCopies()
        simulate_device(CPU, device)
        try:
            # Native loops write where no operation is seen.
            with patch.object(NativeQuantize, "fits", lambda *_: False), self.wrong(), device:
                yield
        finally:
            simulate_device(CPU, None)


NOTHING: frozenset[str] = frozenset()


@contextmanager
def other_scales(factor: float = 1 + 2**-23) -> Generator[None, None, None]:
    """Let integers be packed with scales that are off by a factor: the bits of another division."""
    pack = Integers.pack

    def packed_otherwise(self: Integers, values: torch.Tensor, packed: torch.Tensor, seed: int = 0) -> None:
        pack(self, values, packed, seed)
        self._parts(packed)[0].mul_(factor)

    with patch.object(Integers, "pack", packed_otherwise):
        yield


@contextmanager
def rounded_otherwise() -> Generator[None, None, None]:
    """Let bf16 cut numbers, where the CPU rounds them."""

    def cut(self: BFloat16, values: torch.Tensor, packed: torch.Tensor, seed: int = 0) -> None:
        packed.view(torch.int16).copy_(values.view(torch.int32) >> 16)

    with patch.object(BFloat16, "pack", cut):
        yield


def form(text: str) -> Form:
    return next(each for each in FORMS if each.text == text)


def test_every_codec_that_runs_on_devices_is_tried() -> None:
    there = set(OPTIONS) - {NONE, "threshold"}
    assert {CodecSpec.parse(each.text).name for each in FORMS} == there
    assert all(runs_on_devices(CodecSpec.parse(each.text)) for each in FORMS)
    assert {each.stands_on for each in FORMS} == {"", *OPERATIONS}


@pytest.mark.gate_cases("int8", "powersgd:2", "topk:0.02,exact=true,momentum=0.5,clip_norm=1.0")
@pytest.mark.parametrize("each", FORMS, ids=lambda each: each.text)
def test_a_codec_passes_on_a_simulated_accelerator(each: Form) -> None:
    for subject in (SimulatedSubject(), Subject(CPU)):
        check = check_codec(subject, each, NOTHING)
        assert check.passed, check.answer
        assert check.answer.endswith("the CPU's bits")


def test_other_bits_fail_by_name() -> None:
    subject = SimulatedSubject(wrong=rounded_otherwise)
    check = check_codec(subject, form("bf16"), NOTHING)
    assert check.passed is False
    assert check.name == "codec bf16"
    assert check.answer.startswith("1 elements: mean of step ")
    assert 'codec = "none"' in check.remedy
    assert check_codec(subject, form("fp16"), NOTHING).passed


@pytest.mark.full("further")
def test_a_last_bit_is_rounding_where_the_device_divides_otherwise() -> None:
    """As where a division is a product with a reciprocal."""
    subject = SimulatedSubject(wrong=other_scales)
    int8 = form("int8")
    strict = check_codec(subject, int8, NOTHING)
    assert strict.passed is False
    assert "numbers of tensor 0 differ" in strict.answer
    lenient = check_codec(subject, int8, frozenset({int8.stands_on}))
    assert lenient.passed, lenient.answer
    assert "the CPU's to rounding, equal on all ranks (division" in lenient.answer
    far = SimulatedSubject(wrong=partial(other_scales, 1.01))
    assert check_codec(far, int8, frozenset({int8.stands_on})).passed is False


def test_ranks_with_other_means_fail_even_where_bits_do_not_count() -> None:
    found = run_codec(form("int8"), gradients_of(form("int8"))["5,001 elements"], CPU, "eager")
    assert fault_of(found, found, by_bits=False) == ""
    found.means[1][2][7] += 2e-7
    expected = run_codec(form("int8"), gradients_of(form("int8"))["5,001 elements"], CPU, "eager")
    assert fault_of(found, expected, by_bits=False).startswith("step 1: ranks have different means: 1 of 5001")


def test_operations_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert operations_with_other_bits(CPU) == NOTHING
    drawn = iter(range(2))
    changed = dict(OPERATIONS) | {"mean of a block": lambda x: x + next(drawn)}
    monkeypatch.setattr(codecs_check, "OPERATIONS", changed)
    assert operations_with_other_bits(CPU) == {"mean of a block"}


def test_a_check_that_raises_has_failed() -> None:
    @contextmanager
    def broken() -> Generator[None, None, None]:
        with patch.object(BFloat16, "pack", side_effect=RuntimeError("CUDA error: misaligned address\nmore")):
            yield

    check = check_codec(SimulatedSubject(wrong=broken), form("bf16"), NOTHING)
    assert (check.passed, check.answer) == (False, "RuntimeError: CUDA error: misaligned address")


# -- which devices there are -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "toolkit", "answer", "remedy"),
    [
        (None, None, r"torch \S+ \(built for the CPU alone\) sees no accelerator", "install the torch"),
        (None, "12.8", r"\(built for 12.8\) sees no accelerator", "is its driver loaded"),
        ("mps", None, "sees 2 of kind mps", "farandole test --device mps"),
    ],
)
def test_a_kind_that_is_not_there(
    seen: str | None, toolkit: str | None, answer: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = None if seen is None else torch.device(seen)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", toolkit)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ConfigError, match=f"--device cuda: .*{answer}") as caught:
        find_devices("cuda")
    assert remedy in caught.value.remedy
    assert find_devices("cpu") == 1
    if seen is not None:
        assert find_devices(seen) == 2


# -- the command -----------------------------------------------------------------------------------

OK = {"name": "codec int8", "passed": True, "answer": "bits", "remedy": ""}
BAD = {"name": "codec int4", "passed": False, "answer": "element 5", "remedy": 'codec = "none"'}
MEASURED = {"name": "copies", "passed": None, "answer": "3 TB/s", "remedy": "", "word": "measured"}


def answers(monkeypatch: pytest.MonkeyPatch, *jobs: FollowedJob) -> list[list[str]]:
    """Let jobs end so; return the words of those that are started."""
    started: list[list[str]] = []
    left = list(jobs)

    def follow(command: list[str], *_: object) -> FollowedJob:
        started.append(command)
        return left.pop(0)

    monkeypatch.setattr(cluster_test, "follow_job", follow)
    return started


def test_one_device_that_takes_one_rank_has_no_engine_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = answers(monkeypatch, FollowedJob(0, {"devices": 1, "checks": [MEASURED, OK]}, []))
    assert main(["--device", "xpu"]) == 0
    assert len(started) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "   measured  copies: 3 TB/s"
    assert lines[2] == "not checked  engine on ranks: one device of this kind takes one rank"
    assert lines[-1] == "PASSED"


def test_one_gpu_has_two_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"name": "engine on 2 ranks", "passed": True, "answer": "12 codecs", "remedy": ""}
    started = answers(
        monkeypatch,
        FollowedJob(0, {"devices": 1, "checks": [OK]}, []),
        FollowedJob(0, {"devices": 1, "checks": [engine]}, []),
    )
    assert main(["--device", "cuda"]) == 0
    assert started[1][started[1].index("-np") + 1] == "2"
    assert "--keep" in started[1]
    assert capsys.readouterr().out.splitlines()[-1] == "PASSED"


def test_nccl_takes_ranks_that_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("LOCAL_WORLD_SIZE", "2"),
        ("RANK", "1"),
        ("NCCL_HOSTID", "a"),
        ("NCCL_SOCKET_IFNAME", "eth1"),
    ):
        monkeypatch.setenv(name, value)
    share_device(2)
    assert nccl_host() == "a"
    share_device(1)
    assert nccl_host() == "rank 1 of a"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"


@pytest.mark.parametrize("first", [OK, BAD])
def test_several_devices_are_kept_as_tested_where_all_has_passed(
    first: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = {"name": "engine on 4 ranks", "passed": True, "answer": "12 codecs", "remedy": ""}
    started = answers(
        monkeypatch,
        FollowedJob(0, {"devices": 4, "checks": [first]}, []),
        FollowedJob(0, {"devices": 4, "checks": [engine]}, []),
    )
    assert main(["--device", "cuda", "--json"]) == (0 if first is OK else 1)
    assert started[1][started[1].index("-np") + 1] == "4"
    assert ("--keep" in started[1]) is (first is OK)
    result = json.loads(capsys.readouterr().out)
    assert (result["passed"], result["ranks"]) == (first is OK, 4)
    assert [each["name"] for each in result["checks"]] == [first["name"], "engine on 4 ranks"]


def test_a_job_that_ends_badly_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(
        monkeypatch, FollowedJob(0, {"devices": 2, "checks": [OK]}, []),
        FollowedJob(1, None, ["farandole: rank 1 on b failed after step 0: boom"]),
    )  # fmt: skip
    assert main(["--device", "cuda"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 1 on b failed after step 0: boom"
    assert lines[-1] == "FAILED"


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, FollowedJob(0, {"refused": "--device tpu: torch sees none", "remedy": "look"}, []))
    with pytest.raises(ConfigError, match="--device tpu: torch sees none; look"):
        main(["--device", "tpu"])
    for words in (["-np", "2"], ["-H", "a:1"], ["--seconds", "5"]):
        with pytest.raises(ConfigError, match=f"--device checks this machine alone, and takes no {words[0]}"):
            main(["--device", "cpu", *words])


# -- what is kept ----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_pass_is_kept_for_these_versions(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tested.was_tested(CPU)
    assert not cache.exists()
    path = tested.keep_tested(CPU)
    assert path is not None
    assert path.parent == cache / "farandole" / "devices"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["torch"] == torch.__version__
    assert tested.was_tested(CPU)
    monkeypatch.setattr(tested, "VERSION", "99.0")
    assert not tested.was_tested(CPU)


def test_without_a_cache_nothing_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where a directory would be")
    assert tested.keep_tested(CPU) is None
    assert not tested.was_tested(CPU)
    monkeypatch.setattr(tested, "read_cache_directory", lambda: None)
    assert tested.keep_tested(CPU) is None
    assert not tested.was_tested(CPU)


def test_the_facts_of_a_device() -> None:
    assert describe(CPU).startswith("device cpu, farandole ")
    assert describe_rates(CPU).endswith("GB/s of memory read and written")


def test_norms_of_all_lengths_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = torch.Tensor.norm

    def other_bits(x: torch.Tensor, *options: Any) -> torch.Tensor:
        found: torch.Tensor = norm(x, *options)
        return found * (1 if len(x) != 5002 else 1 + 1e-6)

    compute = OPERATIONS["norm and fused sums"]
    x = torch.randn(1 << 16)
    expected = compute(x)
    monkeypatch.setattr(torch.Tensor, "norm", other_bits)
    assert not torch.equal(compute(x), expected)


def test_ranks_of_one_gpu_are_refused_but_for_names_of_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "unique_id", lambda _: "GPU-1")
    seen = []
    for host in ("", "", "b"):
        monkeypatch.setenv("NCCL_HOSTID", host)
        seen.append({"gpu": connect._taken_gpu(CPU), "place": "cuda:0 of a"})
    connect._refuse_shared_gpus(seen[1:])
    with pytest.raises(ConfigError, match="ranks 0 and 1 are both on cuda:0 of a"):
        connect._refuse_shared_gpus(seen)
