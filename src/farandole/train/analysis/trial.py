"""A process that trains two steps with one micro-batch, and says whether they fit into its memory.

``python -m farandole.train.analysis.trial``: one line of JSON, a `TrialRequest`, comes in on stdin, and one, a
result, goes out on stdout. What the user's code prints goes to stderr. The process dies with its parent.

[Note: a trial's memory] On the CPU the limit is one of writable memory (RLIMIT_DATA): what the process has when
torch and Farandole are ready and nothing is loaded, and what lies between its resident memory then and the limit.
An allocation beyond it fails, and the kernel kills no process. If memory runs out all the same, the kernel is
asked to choose the trial. On an accelerator the limit is torch's own, of its allocator.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...comm.device.accelerator import limit_memory, peak_bytes
from ...core.failures import is_out_of_memory
from ...core.host.process_status import data_bytes, resident_bytes
from ...core.vocabulary.errors import ConfigError, FarandoleError
from ...core.vocabulary.units import format_bytes
from .probe import make_optimizer
from .user_code import (
    batch_in,
    describe,
    errors_of_user,
    forward_loss,
    load_function,
    recomputed,
    weight_type,
    zeros_of,
)

MODULE = "farandole.train.analysis.trial"
STEPS = 2
"""The second step has the optimizer's states from the start."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class TrialRequest:
    """One trial. Functions are texts as `load_function` reads them."""

    model: str
    samples: int
    """The micro-batch."""
    batch: str | None = None
    """Function of the number of samples."""
    inputs: tuple[str, ...] = ()
    """Instead: shapes, whose first number is replaced by the number of samples."""
    loss: str | None = None
    optimizer: str = "adamw"
    device: str = "cpu"
    precision: str = "fp32"
    recompute: str = "none"
    limit_bytes: int | None = None
    path: tuple[str, ...] = ()
    """Where modules are found: the parent's `sys.path`."""

    def to_json(self) -> str:
        """Return the line that the process reads."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class TrialResult:
    """What became of a trial."""

    samples: int
    fits: bool
    peak_bytes: int | None = None
    """The most memory that the process had: resident, or of torch's allocator on an accelerator."""
    reason: str = ""
    """Why it does not fit."""
    is_memory: bool = True
    """Whether memory is the reason, as far as is known."""

    def to_text(self) -> str:
        """Return one line to be read."""
        if self.fits:
            return f"{self.samples} sample{'s' * (self.samples != 1)} fit{'s' * (self.samples == 1)}" + (
                f": {format_bytes(self.peak_bytes)}" if self.peak_bytes else ""
            )
        return f"{self.samples} samples do not fit: {self.reason}"


def main() -> None:
    """Run the trial that stdin asks for."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    mapping = json.loads(sys.stdin.readline())
    mapping["inputs"], mapping["path"] = tuple(mapping["inputs"]), tuple(mapping["path"])
    request = TrialRequest(**mapping)
    sys.path[:] = request.path
    answer.write(json.dumps(asdict(run_trial(request))) + "\n")
    answer.flush()


def run_trial(request: TrialRequest) -> TrialResult:
    """Train `STEPS` steps in this process; everything that goes wrong is a result."""
    try:
        be_like_a_rank()
        set_limit(request.limit_bytes, request.device)
        return TrialResult(request.samples, fits=True, peak_bytes=_train(request))
    except FarandoleError as error:
        cause = error.__cause__ or error
        return TrialResult(request.samples, fits=False, reason=str(error), is_memory=_is_memory(cause))
    except Exception as error:
        return TrialResult(request.samples, fits=False, reason=describe(error), is_memory=_is_memory(error))


def _train(request: TrialRequest) -> int:
    device = torch.device(request.device)
    dtype = weight_type(request.precision)
    make_model = load_function(request.model, what="the model")
    make_batch: Callable[[int], Any] = partial(zeros_of, request.inputs)
    if request.batch:
        make_batch = load_function(request.batch, what="the batch")
    loss = load_function(request.loss, what="the loss") if request.loss else None
    with errors_of_user("making the model"):
        model = make_model()
        model = model.to(device=device, dtype=dtype) if dtype is not None else model.to(device)
    optimizer = make_optimizer(request.optimizer, model.parameters())
    with recomputed(model, request.recompute):
        for _ in range(STEPS):
            with errors_of_user("making the batch"):
                batch = batch_in(dtype, make_batch(request.samples), device)
            with errors_of_user("a training step"):
                forward_loss(model, batch, loss, device=device.type, precision=request.precision).backward()
                optimizer.step()
                # Gradients stay where they are, as those in buckets do.
                optimizer.zero_grad(set_to_none=False)
    of_device = peak_bytes(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if of_device is None else of_device


def be_like_a_rank() -> None:
    """Hold what a rank does before its model: modules of Farandole, and what torch makes at a first operation."""
    from ... import distribute, init  # noqa: F401 - they are loaded when they are asked for

    x = torch.ones(256, 256, dtype=torch.float32, requires_grad=True)
    (x @ x).relu().sum().backward()


def set_limit(limit_bytes: int | None, device: str) -> None:
    """Let this process have at most `limit_bytes`; see [Note: a trial's memory]. None: what there is.

    Raises `ConfigError` for a limit below what it has.
    """
    if limit_bytes is None:
        return
    if limit_memory(torch.device(device), limit_bytes):
        return
    resident, data = resident_bytes(), data_bytes()
    assert resident is not None, "the system tells what is resident"
    assert data is not None, "and what the limit counts"
    if limit_bytes <= resident:
        raise ConfigError(
            f"a limit of {format_bytes(limit_bytes)} is below the {format_bytes(resident)} that "
            "Python, torch and Farandole take without a model"
        )
    allowed = data + limit_bytes - resident
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or is_out_of_memory(str(error))


if __name__ == "__main__":
    main()
