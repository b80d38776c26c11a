"""`fd.prefetch` without ranks: the same batches as without it, at most so many ahead, and no thread left."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

import farandole as fd
from farandole.comm.device.streams import simulate_device
from farandole.train import prefetch
from farandole.train.data.ahead_thread import AheadThread
from farandole.train.prefetch import DeviceCopies
from tests.simulated_device import Race, SimulatedDevice

COUNT = 23
Pair = namedtuple("Pair", ["x", "y"])


class Numbers(Dataset[int]):
    """Its own indexes; `drawn` of them were asked for, and one of them may fail."""

    def __init__(self, fails_at: int = -1) -> None:
        self.drawn = 0
        self.fails_at = fails_at

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        if index == self.fails_at:
            raise OSError(f"no number {index}")
        self.drawn += 1
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "farandole-prefetch"]


def until(is_so: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert is_so()


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


LOADERS: dict[str, Callable[[], Any]] = {
    "indexes": lambda: DataLoader(Numbers(), batch_size=4),
    "workers": lambda: DataLoader(Numbers(), batch_size=4, num_workers=2),
    "persistent workers": lambda: DataLoader(Numbers(), batch_size=4, num_workers=1, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "list": lambda: [[1, 2], [3], []],
    "empty": list,
}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_same_batches_epoch_after_epoch(kind: str, depth: int) -> None:
    expected = [plain(each) for each in LOADERS[kind]()]
    loader = fd.prefetch(LOADERS[kind](), depth=depth)
    for stop in (None, 2, None):
        found = []
        for batch in loader:
            found.append(plain(batch))
            if len(found) == stop:
                break
        assert found == expected[:stop]
        assert not threads(), "the loop has ended"


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_at_most_so_many_are_drawn_ahead(depth: int) -> None:
    numbers = Numbers()
    batches = iter(fd.prefetch(DataLoader(numbers, batch_size=1), depth=depth))
    for taken in range(1, 5):
        assert int(next(batches)) == taken - 1
        until(lambda taken=taken: numbers.drawn == taken + depth)  # type: ignore[misc]
        time.sleep(0.02)
        assert numbers.drawn == taken + depth


def test_an_iterator_loses_nothing_to_a_break() -> None:
    loader = fd.prefetch(iter(range(10)), depth=3)
    assert [next(iter(loader)) for _ in range(2)] == [0, 1]
    found = []
    for each in loader:
        found.append(each)
        if each == 4:
            break
    running = iter(loader)
    assert next(running) == 5
    assert iter(loader) is running, "as of an iterator, loops share what comes"
    assert [*found, *running, *loader] == [2, 3, 4, 6, 7, 8, 9]
    assert not threads()


def numbers_until(limit: int) -> Iterator[int]:
    yield from range(limit)
    raise OSError(f"no number {limit}")


@pytest.mark.parametrize(
    "made", [lambda: numbers_until(3), lambda: DataLoader(Numbers(fails_at=3), batch_size=None)]
)
def test_an_error_of_the_loader_is_raised_in_the_place_of_its_batch(made: Callable[[], Any]) -> None:
    loader = fd.prefetch(made(), depth=8)
    found: list[int] = []
    with pytest.raises(OSError, match="no number 3") as raised:
        found.extend(int(each) for each in loader)
    assert found == [0, 1, 2]
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert {"numbers_until", "__getitem__"} & set(frames), frames
    assert not threads()


def test_an_error_of_a_worker_and_of_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # The wait of torch for each worker of an iterator that an error has ended, when it is collected.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    for fails_at, workers, wanted in ((5, 1, 1), (0, 0, 0)):
        loader = fd.prefetch(DataLoader(Numbers(fails_at=fails_at), batch_size=4, num_workers=workers))
        found: list[Any] = []
        with pytest.raises(OSError, match=f"no number {fails_at}"):
            found.extend(loader)
        assert len(found) == wanted
        assert not threads()
    del loader
    gc.collect()


@pytest.mark.full("slow")
def test_an_error_in_the_loop_and_a_dropped_iterator_end_the_thread() -> None:
    loader = fd.prefetch(DataLoader(Numbers(), batch_size=2))

    def fail() -> None:
        for _ in loader:
            raise ValueError("of the loop")

    with pytest.raises(ValueError, match="of the loop"):
        fail()
    assert not threads()
    batches = iter(loader)
    next(batches)
    assert threads()
    del batches
    assert not threads()
    iter(loader)  # never begun
    assert len(list(loader)) == len(loader)


def test_a_loop_that_is_left_closes_what_it_was_over() -> None:
    closed = []

    class Closing:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(9)
            finally:
                closed.append(threading.current_thread().name)

    for each in fd.prefetch(Closing()):
        if each == 1:
            break
    assert len(closed) == 1


def test_a_loader_that_hangs_does_not_keep_a_loop_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_JOIN_SECONDS", 0.05)
    goes_on = threading.Event()

    def hang() -> Iterator[int]:
        yield 0
        goes_on.wait(20)
        yield 1

    loader = fd.prefetch(hang())
    begin = time.monotonic()
    for _ in loader:
        break
    assert time.monotonic() - begin < 5
    assert threads()
    goes_on.set()
    assert list(loader) == [1], "what was being drawn is not lost"
    until(lambda: not threads())


def test_it_is_asked_for_what_the_loader_is_asked_for() -> None:
    source = DataLoader(Numbers(), batch_size=4)
    loader = fd.prefetch(source)
    assert len(loader) == len(source) == 6
    assert (loader.batch_size, loader.dataset, loader.sampler) == (4, source.dataset, source.sampler)
    assert not hasattr(loader, "set_epoch")
    with pytest.raises(TypeError):
        len(fd.prefetch(iter([1])))


def test_what_is_refused() -> None:
    with pytest.raises(fd.ConfigError, match="expected an iterable of batches, got int"):
        fd.prefetch(3)  # type: ignore[arg-type]
    for depth in (0, True, 1.5):
        with pytest.raises(fd.ConfigError, match="expected a number of batches from 1"):
            fd.prefetch([], depth=depth)  # type: ignore[arg-type]
    with pytest.raises(fd.ConfigError, match="'nowhere' is none"):
        fd.prefetch([], device="nowhere")
    with pytest.raises(fd.ConfigError, match="'meta' is not there"):
        fd.prefetch([], device="meta")
    with pytest.raises(fd.ConfigError, match=r"inside what another fd\.prefetch reads ahead"):
        list(fd.prefetch(each for each in fd.prefetch([1, 2])))
    assert not threads()


class Counting:
    """A loader of another library, whose state is what it has given."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        while self.given < 5:
            self.given += 1
            yield self.given
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def test_a_state_that_counts_what_was_drawn_ahead_is_refused() -> None:
    loader = fd.prefetch(Counting())
    assert loader.state_dict() == {"given": 0}
    for _ in range(2):
        for _ in loader:
            with pytest.raises(fd.ConfigError, match="the state of a Counting in an epoch counts batches"):
                loader.state_dict()
            break
        with pytest.raises(fd.ConfigError, match=r"prefetch a loader of fd\.shard"):
            loader.state_dict()
        loader.load_state_dict({"given": 3})
        assert loader.state_dict() == {"given": 3}
        assert list(loader) == [4, 5]
        assert loader.state_dict() == {"given": 0}


def test_gradients_are_off_in_the_thread_where_they_are_in_the_loop() -> None:
    def modes() -> Iterator[bool]:
        for _ in range(4):
            yield torch.is_grad_enabled()

    assert list(fd.prefetch(modes())) == [True] * 4
    with torch.no_grad():
        assert list(fd.prefetch(modes())) == [False] * 4
    assert torch.is_grad_enabled()


class Augmented(Numbers):
    def __getitem__(self, index: int) -> Any:
        return random.random()


@pytest.mark.parametrize(
    ("made", "is_said"),
    [
        (lambda: DataLoader(Augmented(), batch_size=4), True),
        (lambda: DataLoader(Augmented(), batch_size=4, num_workers=1), False),
        (lambda: DataLoader(Numbers(), batch_size=4, shuffle=True), False),
        (lambda: [1, 2, 3], False),
    ],
)
def test_random_numbers_that_depend_on_timing_are_said(
    made: Callable[[], Any], is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = fd.prefetch(made())
    for _ in range(2):
        list(loader)
    assert capsys.readouterr().err.count("draws random numbers from the generators") == is_said


# -- copies to a device ---------------------------------------------------------------------------


class Other:
    """Of a kind that is not known."""

    def __init__(self) -> None:
        self.x = torch.ones(2)


def test_copies_keep_the_shape_of_a_batch() -> None:
    x, y, z = torch.ones(3), torch.zeros(2), torch.full((2, 2), 5.0)
    packed, other = pack_sequence([torch.ones(3), torch.ones(2)]), Other()
    batch = {"a": [x, (y, 3, "text", None)], "b": Pair(z, x), "c": other, "d": packed, "e": 1.5}
    with SimulatedDevice() as device:
        sent = DeviceCopies(torch.device("cpu"), device).send(batch)
    found = sent.batch
    assert found.keys() == batch.keys()
    assert torch.equal(found["a"][0], x)
    assert found["a"][0] is not x
    assert found["b"].y is found["a"][0], "a tensor that is there twice is copied once"
    assert type(found["b"]) is Pair
    assert (found["a"][1][1:], found["e"]) == ((3, "text", None), 1.5)
    assert found["c"] is other
    assert type(found["d"]) is type(packed)
    assert sent.copies[id(z)] is found["b"].x


def one_step(device: SimulatedDevice, copies: DeviceCopies, total: torch.Tensor, batch: Any) -> None:
    sent = copies.send(batch)
    copies.receive(sent)
    total.add_(sent.batch)


@pytest.mark.parametrize("left_out", [None, "end", "keep"])
def test_the_stream_of_the_loop_waits_for_copies_and_their_memory_for_it(left_out: str | None) -> None:
    batches = [torch.full((8,), float(i)) for i in range(5)]
    device: Any = SimulatedDevice([left_out] if left_out else [])
    copies = DeviceCopies(torch.device("cpu"), device)

    def run() -> torch.Tensor:
        with device:
            total = torch.zeros(8)
            for batch in batches:
                one_step(device, copies, total, batch)
        return total

    if left_out is None:
        assert torch.equal(run(), torch.full((8,), 10.0))
        return
    with pytest.raises(Race):
        run()


class Noting:
    """The streams of a device that notes who called what."""

    model, current, side, copies = "noting", "current", "side", "copies"

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def _note(self, what: str) -> None:
        self.calls.append((what, threading.current_thread().name))

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self._note(f"on {stream}")
        yield

    def record(self) -> Any:
        self._note("record")
        return len(self.calls)

    def wait(self, event: Any) -> None:
        self._note(f"wait {event}")

    def keep(self, tensor: torch.Tensor) -> None:
        self._note("keep")

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note("copy")
        return tensor.clone()


def test_the_thread_copies_and_the_loop_waits() -> None:
    streams: Any = Noting()
    cpu, sources = torch.device("cpu"), [torch.ones(2) for _ in range(3)]
    simulate_device(cpu, streams)
    try:
        found = list(fd.prefetch(sources, device="cpu"))
    finally:
        simulate_device(cpu, None)
    assert [torch.equal(each, torch.ones(2)) for each in found] == [True] * 3
    assert not {each.data_ptr() for each in found} & {each.data_ptr() for each in sources}
    mine = threading.current_thread().name
    threads_of = {
        name: [thread for what, thread in streams.calls if what.startswith(name)]
        for name in ("copy", "record", "wait", "keep")
    }
    assert threads_of["copy"] == [mine, "farandole-prefetch", "farandole-prefetch"]
    assert threads_of["record"] == threads_of["copy"]
    assert threads_of["wait"] == threads_of["keep"] == [mine] * 3


# -- the end of the process -----------------------------------------------------------------------

_LEAVES = """
import sys, time
import farandole as fd
def endless():
    number = 0
    while True:
        yield number
        number += 1
        time.sleep(float(sys.argv[1]))
kept = iter(fd.prefetch(endless()))
print(next(kept), flush=True)
if sys.argv[2] == "waits":
    while True:
        next(kept)
"""


@pytest.mark.full("further")
@pytest.mark.parametrize(("seconds", "what", "code"), [("0.01", "leaves", 0), ("600", "waits", -signal.SIGINT)])
def test_the_process_ends_though_a_thread_draws(seconds: str, what: str, code: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _LEAVES, seconds, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "0\n"
            if what == "waits":
                time.sleep(0.2)
                job.send_signal(signal.SIGINT)
            _, said = job.communicate(timeout=25)
        finally:
            job.kill()
    assert job.returncode == code, said
    assert ("KeyboardInterrupt" in said) == (what == "waits"), said
    assert "terminate called" not in said


def test_a_thread_that_is_not_there_is_named() -> None:
    """As in a process that was forked in the loop."""
    thread: AheadThread[int] = AheadThread(lambda: 1, 1, "gone")
    thread.start()
    assert thread.take() == 1
    thread._places.put(False)
    thread.join()
    assert thread.take() == 1
    with pytest.raises(RuntimeError, match="the thread 'gone' is not in this process"):
        thread.take()
