"""Why a host is given up: its own fault, or ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from farandole.core.vocabulary.errors import ConfigError
from farandole.launch.ssh.host_failure import why_hung_up
from farandole.launch.ssh.remote_shell import HostSetup
from farandole.launch.supervise.failure import Exit, Loss, find_cause, remedy_of
from farandole.launch.supervise.stopped_process import OwnPauses


@dataclass
class Link:
    """A host whose pipe has ended."""

    name: str = "host0"
    errors: bytes = b""
    code: int | None = 1
    silent: float = 0.1
    ready: bool = True

    def wait(self, seconds: float) -> int | None:
        return self.code

    def read_stderr(self) -> bool:
        return False

    def silent_seconds(self, now: float) -> float:
        return self.silent


SETUP = HostSetup(".", "python", "")


def test_a_launcher_that_stood_still_says_so() -> None:
    link: Any = Link()
    ending = why_hung_up(link, SETUP, 10.0, stood_still_seconds=5.1)
    loss = Loss(link.name, 10.0, ending, (0,))
    failed = Exit(1, 1, 9.0, held="gloo: Connection closed by peer")
    found = find_cause([failed], [], [loss], 0.1)
    assert found is not None
    assert found.exit_code == 1
    lines = found.to_text(Path("r")).splitlines()
    assert lines[0] == (
        "farandole: this launcher stood still for 5 s; hosts stop their ranks when they have heard nothing for 4 s"
    )
    assert "Ctrl-Z" in lines[1]
    assert "host0" not in "\n".join(lines)


def test_a_short_pause_of_ours_is_no_excuse() -> None:
    link: Any = Link()
    ending = why_hung_up(link, SETUP, 10.0, stood_still_seconds=3.2)
    assert not ending.is_ours
    assert ending.cause == "its supervisor was killed"
    stranger: Any = Link(ready=False, code=255, errors=b"ssh: Could not resolve hostname host0")
    assert why_hung_up(stranger, SETUP, 10.0, stood_still_seconds=5.0).exit_code == ConfigError.exit_code


def test_pauses_of_our_own() -> None:
    pauses = OwnPauses(100.0)
    for moment in range(1, 40):
        assert not pauses.look(100.0 + moment / 4)
        assert pauses.recent_seconds(100.0 + moment / 4) == 0.0
    assert pauses.recent_seconds(112.75) == 3.0, "it has woken up, and has not looked yet"
    assert pauses.look(112.75)
    assert not pauses.look(113.0)
    assert pauses.recent_seconds(113.1) == 3.0
    assert not pauses.look(113.9)
    for moment in range(1, 20):
        pauses.look(113.9 + moment / 4)
    assert pauses.recent_seconds(118.7) == 0.0, "what it caused is known by now"


def test_torchs_own_words_have_a_remedy() -> None:
    """The errors are torch's as it is installed: words of another version would have none."""
    norm, store = nn.LayerNorm(4, dtype=torch.bfloat16), dist.HashStore()
    with pytest.raises(RuntimeError) as widened:
        norm(torch.ones(2, 4))
    assert "x * self.scale.to(x.dtype)" in remedy_of(str(widened.value)), f"{widened.value}"
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        whole = torch.ones(4)
        with pytest.raises(RuntimeError) as mixed:
            distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)]) + whole
        with pytest.raises(ValueError, match="device_ids") as placed:
            DistributedDataParallel(nn.Linear(2, 2), device_ids=[0])
    finally:
        dist.destroy_process_group()
    assert "full_tensor() to the loss" in remedy_of(str(mixed.value)), f"{mixed.value}"
    assert "leave them out where there is none" in remedy_of(str(placed.value)), f"{placed.value}"


def test_errors_of_memory_say_the_limit_and_what_needs_less() -> None:
    """The errors are those of torch, Python and NumPy as they are installed."""
    makers: list[Any] = [lambda: torch.empty(10**14), lambda: bytearray(10**15), lambda: np.empty(10**15)]
    for make in makers:
        with pytest.raises((RuntimeError, MemoryError)) as failed:
            make()
        remedy = remedy_of(f"{type(failed.value).__name__}: {failed.value}", "1.3 GB (RLIMIT_DATA)")
        assert remedy.startswith("out of memory at the limit of 1.3 GB (RLIMIT_DATA): "), f"{failed.value!r}"
        assert all(each in remedy for each in ("farandole estimate", "zero=3", "recompute=blocks")), remedy
    gpu = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
        "GPU 1 has a total capacity of 79.10 GiB of which 1.20 GiB is free."
    )
    assert remedy_of(gpu, "1.3 GB (RLIMIT_AS)").startswith("out of memory at the 79.10 GiB of GPU 1: take")
    aborted = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"
    assert remedy_of(aborted).startswith("out of memory: take a smaller batch")
    library = "ImportError: libgomp.so.1: cannot allocate memory in static TLS block"
    assert remedy_of(library) == "", "a library could not be loaded"
