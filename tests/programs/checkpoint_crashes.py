"""Kills a save at each of its system calls, and looks at what is left.

``python -m tests.programs.checkpoint_crashes DIR [--ranks 2] [--every 7]`` imports torch once. For each kill it
forks the ranks, which open a `fd.Checkpointer`, save step 1 and stop. strace is attached to them and to their
writers, they go on to save step 2, and strace kills whichever of them makes the k-th call of a kind. Then the
others are killed too, and new processes load what is there and save step 3.

[Note: all k] strace counts the calls of each kind in each thread by itself. One run without a kill tells how many
there are; calls of each kind are killed at 1, 2, ... up to the most that a thread made. What the ranks do before
they stop is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

import farandole as fd
from farandole.checkpoint.directory import saved_steps, step_directory
from farandole.checkpoint.listing import verify_checkpoint
from tests.programs.forked_ranks import forked, free_port, import_all, wait_for

_CALL = re.compile(r"^(\d+) +(\w+)\(")
_SECONDS = 60.0
_SHAPE = (65, 130)


def why_impossible() -> str:
    """Return what keeps this user from tracing processes; nothing when they can."""
    if shutil.which("strace") is None:
        return "needs strace (apt-get install strace)"
    with subprocess.Popen(["sleep", "30"]) as child:
        try:
            tried = subprocess.run(
                ["timeout", "-s", "INT", "0.3", "strace", "-p", str(child.pid)], capture_output=True, text=True,
                check=False,
            )  # fmt: skip
        finally:
            child.kill()
    return "" if "attached" in tried.stderr else f"may not trace processes: {tried.stderr.strip()}"


@dataclass
class Outcome:
    """What was seen."""

    kills: int = 0
    """Saves in which a process was killed."""
    old: int = 0
    """Of them, those after which the old checkpoint is the last."""
    new: int = 0
    faults: list[str] = field(default_factory=list)


class Crashes:
    """The kills of a save by some ranks."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._directory, self._ranks = directory, ranks
        self._first = directory / "first"
        self._work = directory / "work"
        import_all()
        codes = self._fork(lambda: _save(self._first, 1), trace=None)
        assert codes == [0] * ranks, f"the first save ended with {codes}"

    def calls(self) -> Counter[str]:
        """Return the kinds of calls that a save makes, and the most of a kind in a thread."""
        log = self._directory / "calls"
        self._reset()
        codes = self._fork(lambda: _save(self._work, 2, stops=True), trace=["-o", str(log)])
        assert codes == [0] * self._ranks, f"the save ended with {codes}"
        found: Counter[tuple[str, str]] = Counter(
            (match.group(1), match.group(2))
            for line in log.read_text().splitlines()
            if (match := _CALL.match(line))
        )
        most: Counter[str] = Counter()
        for (_, name), count in found.items():
            most[name] = max(most[name], count)
        return most

    def kill_at(self, name: str, k: int, outcome: Outcome) -> None:
        """Kill a save at the k-th call of a kind, and add what is left to `outcome`."""
        self._reset()
        said = self._directory / "said"
        said.unlink(missing_ok=True)

        def save() -> None:
            _save(self._work, 2, stops=True)
            said.touch()

        codes = self._fork(save, trace=["-o", os.devnull, "-e", f"inject={name}:signal=KILL:when={k}"])
        where = f"kill at {name} {k}"
        if not any(codes):
            return  # timing: this time no thread made so many
        outcome.kills += 1
        try:
            steps = saved_steps(self._work)
            for step in steps:
                verify_checkpoint(self._work, step)
            if not steps or set(steps) - {1, 2}:
                outcome.faults.append(f"{where}: checkpoints of {steps}")
            if said.exists() and 2 not in steps:
                outcome.faults.append(f"{where}: fd said that step 2 was saved, and it is not there")
        except fd.FarandoleError as problem:
            outcome.faults.append(f"{where}: {problem}")
            return
        last = steps[-1] if steps else 0
        outcome.old += last == 1
        outcome.new += last == 2
        after = self._fork(lambda: _load_and_save(self._work, last), trace=None)
        if after != [0] * self._ranks:
            outcome.faults.append(f"{where}: loading step {last} and saving step 3 ended with {after}")
            return
        here = sorted(path.name for path in self._work.glob("step-*"))
        if here != [step_directory(self._work, step).name for step in (*steps, 3)]:
            outcome.faults.append(f"{where}: left {here}")

    def _reset(self) -> None:
        for place in self._directory.glob("here-*"):
            place.unlink()
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(self._first, self._work)

    def _fork(self, play: Callable[[], None], trace: Sequence[str] | None) -> list[int]:
        """Run `play` as each rank; with `trace`, under strace from when all have stopped. Return exit codes."""
        port = free_port()
        children = [forked(play, rank, self._ranks, port, self._directory / "log") for rank in range(self._ranks)]
        tracer = None
        try:
            if trace is not None:
                for child in children:
                    _, status = os.waitpid(child, os.WUNTRACED)
                    if not os.WIFSTOPPED(status):
                        raise AssertionError((self._directory / "log").read_text())
                traced = [each for child in children for each in [child, *_children(child)]]
                tracer = _attach(traced, trace)
                for child in children:
                    os.kill(child, signal.SIGCONT)
            return wait_for(children, _SECONDS)
        finally:
            for child in children:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
            if tracer is not None:
                tracer.terminate()
                tracer.wait()


def _save(directory: Path, step: int, *, stops: bool = False) -> None:
    model, optimizer = _training(1)
    saver = fd.Checkpointer(directory, model, optimizer, keep=5, asynchronous=False)
    if stops:
        assert saver.save(1), "the writer has begun"
        _fill(model, step)
        _meet(directory)
        os.kill(os.getpid(), signal.SIGSTOP)
    saver.save(step)
    saver.close()
    assert saved_steps(directory)[-1] == step, "the alarm is in the log"


def _meet(directory: Path) -> None:
    """Return when all ranks are here: one that has stopped serves the others' store no more."""
    here = fd.init()
    directory.with_name(f"here-{here.rank}").touch()
    while not all(directory.with_name(f"here-{rank}").exists() for rank in range(here.size)):
        time.sleep(0.002)


def _load_and_save(directory: Path, step: int) -> None:
    model, optimizer = _training(0)
    saver = fd.Checkpointer(directory, model, optimizer)
    assert saver.load() == step, f"step {step} is the last"
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, step)), f"the weights of step {step}"
    saver.save(3)
    saver.close()


def _training(value: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a training whose weights are `value`."""
    fd.init()
    model = torch.nn.Linear(*_SHAPE)
    model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
    model(torch.ones(1, _SHAPE[0])).sum().backward()
    optimizer.step()
    _fill(model, value)
    return model, optimizer


def _fill(model: torch.nn.Module, value: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def _children(process: int) -> list[int]:
    return [each.pid for each in psutil.Process(process).children(recursive=True)]


def _attach(processes: Sequence[int], words: Sequence[str]) -> subprocess.Popen[str]:
    listed = [word for process in processes for word in ("-p", str(process))]
    tracer = subprocess.Popen(["strace", "-f", *words, *listed], stderr=subprocess.PIPE, text=True)
    waiting = set(processes)
    assert tracer.stderr is not None
    while waiting:
        line = tracer.stderr.readline()
        assert line, "strace ended"
        match = re.search(r"Process (\d+) attached", line)
        if match is not None:
            waiting.discard(int(match.group(1)))
    return tracer


def main(arguments: Sequence[str]) -> None:
    """Kill a save at each of its system calls, or at some of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="an empty directory to work in")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="kill at every N-th of them only")
    options = parser.parse_args(arguments)
    crashes = Crashes(options.directory, options.ranks)
    calls = crashes.calls()
    places = [(name, k) for name, most in sorted(calls.items()) for k in range(1, most + 1)]
    outcome = Outcome()
    for name, k in places[:: options.every]:
        crashes.kill_at(name, k, outcome)
    tried = len(places[:: options.every])
    print(json.dumps({
        "ranks": options.ranks, "calls": sum(calls.values()), "kinds": len(calls), "tried": tried,
        "kills": outcome.kills, "old": outcome.old, "new": outcome.new, "faults": outcome.faults,
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
