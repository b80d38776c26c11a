"""The parts of the watcher for ranks that do no steps: its limit, and how it reads a stack."""

from __future__ import annotations

import importlib
import pdb
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import farandole as fd
from farandole.core.failures import Position
from farandole.core.vocabulary.spec import Plan
from farandole.horovod.named_ops.operations import PendingTicket
from farandole.train.stall_sampler import (
    STILL_SAMPLES,
    Sampler,
    Stack,
    find_operation,
    find_pause,
    find_place,
    read_stack,
)
from farandole.train.stall_watcher import FIRST_STEPS, Pace, StallWatcher

DEFAULT = Plan().stall_seconds


def paced(step_seconds: float, steps: int = 50) -> Pace:
    pace = Pace(0.0)
    for step in range(1, steps + 1):
        pace.look(step * step_seconds, step, most_seconds=1e9)
    return pace


@pytest.mark.parametrize(("step_seconds", "limit"), [(0.005, 10.0), (0.4, 10.0), (0.6, 12.0), (9.0, 180.0)])
def test_the_default_limit_is_ten_seconds_or_twenty_median_steps(step_seconds: float, limit: float) -> None:
    assert paced(step_seconds).limit_seconds(DEFAULT) == pytest.approx(limit)


def test_the_limit_is_by_the_median() -> None:
    pace = paced(1.0, steps=20)
    pace.look(1000.0, 21, most_seconds=1e9)  # one evaluation
    assert pace.limit_seconds(DEFAULT) == pytest.approx(20.0)


def test_the_first_steps_may_take_a_minute() -> None:
    pace = Pace(0.0)
    assert pace.limit_seconds(DEFAULT) == 60.0
    for step in range(1, FIRST_STEPS):
        pace.look(float(step), step, most_seconds=1e9)
        assert pace.limit_seconds(DEFAULT) == 60.0
    pace.look(9.0, FIRST_STEPS, most_seconds=1e9)
    assert pace.limit_seconds(DEFAULT) != 60.0


def test_several_steps_between_two_looks_share_the_time() -> None:
    pace = Pace(0.0, done=10)
    pace.look(10.0, 15, most_seconds=1e9)
    assert pace.limit_seconds(1.0) == pytest.approx(40.0)


def test_time_in_which_the_process_was_suspended_does_not_count() -> None:
    pace = paced(0.1)
    begin = 5.0
    pace.look(begin + 3600.0, 50, most_seconds=3.0)
    assert pace.quiet_seconds == 3.0


@contextmanager
def in_a_thread(function: Any) -> Iterator[int]:
    """Run `function(stop)` in a thread, which waits for `stop` or works; yield its number once it does."""
    stop = threading.Event()
    thread = threading.Thread(target=function, args=(stop,), daemon=True)
    thread.start()
    number = thread.ident
    assert number is not None
    deadline = time.monotonic() + 60  # the first optimizer of a process imports much
    while not {"wait", "works"} & {call.function for call in read_stack(number)}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    try:
        yield number
    finally:
        stop.set()
        thread.join(10)


def stack_of(function: Any) -> Stack:
    with in_a_thread(function) as number:
        return read_stack(number)


HERE = str(Path(__file__).relative_to(Path.cwd())) if Path(__file__).is_relative_to(Path.cwd()) else __file__


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stop: threading.Event) -> torch.Tensor:
        ctx.stop = stop
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.stop.wait()
        return gradients[0], None


def backward(stop: threading.Event) -> None:
    y = Waits.apply(torch.ones(1, requires_grad=True), stop)
    y.backward()


def optimizer_step(stop: threading.Event) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def wait_in_torch(*_: Any) -> None:
        stop.wait()

    optimizer.register_step_pre_hook(wait_in_torch)
    optimizer.step()


class SlowData(Dataset[int]):
    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.stop.wait()
        return index


def loading(stop: threading.Event) -> None:
    next(iter(DataLoader(SlowData(stop))))


def debugged(stop: threading.Event) -> None:
    """Stop in a debugger, as ``breakpoint()`` does."""

    class Waits(pdb.Pdb):
        def cmdloop(self, intro: Any = None) -> None:
            stop.wait()
            self.set_continue()

    Waits(nosigint=True).set_trace()
    stop.is_set()


@pytest.mark.parametrize(
    ("function", "operation"),
    [(backward, "backward"), (optimizer_step, "optimizer.step"), (loading, "the data loader")],
)
def test_the_operation_and_the_users_line(function: Any, operation: str) -> None:
    stack = stack_of(function)
    assert find_operation(stack) == operation
    place = find_place(stack)
    assert place.startswith(f"{HERE}:"), place
    assert not find_pause(stack)


def test_packages_on_the_pythonpath_are_not_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``pip install --target DIRECTORY`` puts them there, beside what says that they are installed."""
    found = []
    for name in ("installed", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"engine_{name}.py").write_text("def run(call, stop):\n    call(stop)\n")
        monkeypatch.syspath_prepend(tmp_path / name)
    (tmp_path / "installed" / "engine-1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name in ("installed", "own"):
        engine = importlib.import_module(f"engine_{name}")
        found.append(find_place(stack_of(lambda stop, engine=engine: engine.run(threading.Event.wait, stop))))
    assert found[0].startswith(f"{HERE}:"), found
    assert "engine_own.py:2 (run)" in found[1], found


def test_an_operation_of_horovod_is_an_exchange() -> None:
    def named(stop: threading.Event) -> None:
        ticket = PendingTicket(before_wait=stop.wait)  # type: ignore[arg-type]
        ticket.finish(None)
        ticket.wait()

    assert sampled(named, []).kind == "waiting"


def test_a_debugger_is_a_pause() -> None:
    assert find_pause(stack_of(debugged)) == "a debugger"


def sampled(function: Any, phases: list[str]) -> Position:
    with in_a_thread(function) as number:
        sampler = Sampler(number, phases, on_gpu=False)
        for _ in range(STILL_SAMPLES + 3):
            time.sleep(0.05)
            sampler.sample()
        return sampler.position(3, 7)


def waits(stop: threading.Event) -> None:
    stop.wait()


def works(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


def test_a_thread_that_stands_and_one_at_work() -> None:
    position = sampled(waits, [])
    assert (position.rank, position.step, position.kind) == (3, 7, "idle")
    assert position.place.endswith("(waits)")
    assert sampled(works, []).kind == "working"
    assert sampled(loading, []).kind == "data"
    assert sampled(waits, ["evaluation"]).kind == "pause"
    assert sampled(waits, ["evaluation"]).operation == "the phase 'evaluation'"


def interrupted(stop: threading.Event) -> None:
    try:
        raise KeyboardInterrupt
    finally:
        stop.wait()


def excepthook(stop: threading.Event) -> None:
    stop.wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("function", [interrupted, excepthook])
def test_what_an_interrupted_thread_does_is_not_where_it_stood(function: Any) -> None:
    with in_a_thread(waits) as number:
        sampler = Sampler(number, [], on_gpu=False)
        sampler.sample()
        stood = sampler.stack
    with in_a_thread(function) as number:
        sampler._thread = number
        sampler.sample()
        assert sampler.left
        assert sampler.stack == stood


def test_a_phase_is_open_inside_its_context_only() -> None:
    from farandole.train.stall_watcher import open_phases

    here = fd.init(progress=False)
    try:
        names = open_phases(here)
        with fd.phase("evaluation"), fd.phase("checkpoint"):
            assert names == ["evaluation", "checkpoint"]
        with pytest.raises(ZeroDivisionError), fd.phase("evaluation"):
            raise ZeroDivisionError
        assert names == []
    finally:
        fd.shutdown()


def test_an_error_of_a_look_is_told_once_and_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    looks = threading.Semaphore(0)

    def look(now: float) -> None:
        looks.release()
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(StallWatcher, "_period", 0.01)
    watcher = StallWatcher(fd.init(), tmp_path, None)
    monkeypatch.setattr(watcher, "_look", look)
    watcher.open()
    try:
        for _ in range(3):
            assert looks.acquire(timeout=10), "the watch has ended"
    finally:
        watcher.close(keep_positions=False)
    assert capfd.readouterr().err.count("looking for hangs: RuntimeError: dictionary changed size") == 1
