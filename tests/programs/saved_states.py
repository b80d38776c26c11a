"""Generated programs of checkpoints: random trainings are saved, killed or damaged, and go on in other worlds.

``python -m tests.programs.saved_states DIR --seeds 0:50`` imports torch once. For each seed a training runs as it
would if nothing stopped it, and notes what it holds after each step. The same training then saves; it is killed,
or a byte of what it has written is changed. Ranks of another number, at another ZeRO stage, then load.

What must be true: what is loaded is what the first training held after that step, bit for bit; of what
`after_step` has reported nothing is lost; what is damaged is passed over for the one before; training goes on and
saves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.checkpoint.directory import saved_steps, step_directory
from farandole.checkpoint.listing import verify_checkpoint
from tests.programs.forked_ranks import forked, free_port, import_all, wait_for
from tests.programs.saved_values import bits_of, difference, draw_tensor, draw_value

_SECONDS = 60.0
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, 0.01, amsgrad=True),
}


class SavedProgram(NamedTuple):
    """What one training does, and what happens to it."""

    seed: int
    ranks: int
    zero: int
    later_ranks: int
    later_zero: int
    steps: int
    every: int
    keep: int | None
    is_async: bool
    optimizer: str
    event: str

    @property
    def goes_on_alike(self) -> bool:
        """Whether the ranks that load are as many as saved, at the same stage: then further bits are the same."""
        return (self.ranks, self.zero) == (self.later_ranks, self.later_zero)


def draw(seed: int) -> SavedProgram:
    """Return the program of a seed."""
    dice = random.Random(seed)
    worlds = [1, 1, 1, 2, 2, 3]
    ranks = dice.choice(worlds)
    zero = dice.choice([0, 0, 1, 2, 3]) if ranks > 1 else 0
    is_same = dice.random() < 0.5
    later_ranks = ranks if is_same else dice.choice(worlds)
    later_zero = zero if is_same else dice.choice([0, 1, 2, 3]) if later_ranks > 1 else 0
    return SavedProgram(
        seed=seed,
        ranks=ranks,
        zero=zero,
        later_ranks=later_ranks,
        later_zero=later_zero,
        steps=dice.randint(2, 6),
        every=dice.choice([1, 1, 2, 3]),
        keep=dice.choice([None, 1, 2, 3]),
        is_async=dice.random() < 0.5,
        optimizer=dice.choice(sorted(OPTIMIZERS)),
        event=dice.choice(["nothing", "nothing", "kill", "kill", "flip", "flip", "cut", "missing"]),
    )


class _Net(nn.Module):
    """Layers, maybe tied, and buffers of all types that each step draws anew."""

    def __init__(self, seed: int, *, is_new: bool) -> None:
        super().__init__()
        dice = random.Random(seed)
        torch.manual_seed(seed + is_new)
        width = dice.randint(2, 9)
        layers: list[nn.Module] = [nn.Linear(6, width), nn.Tanh()]
        if dice.random() < 0.4:
            layers.append(nn.Dropout(0.2))
        layers += [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 2)]
        self.layers = nn.Sequential(*layers)
        if dice.random() < 0.3:
            self.layers[-2].weight = self.layers[-4].weight
        self.drawn = dice.randint(0, 4)
        self.draw_buffers(seed, 0)

    def draw_buffers(self, seed: int, step: int) -> None:
        """Let the buffers be those of a step; their types and shapes do not change."""
        for number in range(self.drawn):
            dice = random.Random(f"{seed} {number}")
            drawn = draw_tensor(dice).clone()
            if drawn.numel():
                drawn = drawn.roll(step) if not drawn.dtype.is_complex else drawn
            self.register_buffer(f"buffer_{number}", drawn)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


class _Object:
    """A user's object with a state of each rank."""

    def __init__(self) -> None:
        self.state: Any = {}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class _Training:
    """A training on this rank."""

    def __init__(self, program: SavedProgram, zero: int, *, is_new: bool = True) -> None:
        self.here = fd.init(timeout_seconds=20)
        self.program, self.step = program, 0
        self.net = _Net(program.seed, is_new=is_new)
        self.optimizer = OPTIMIZERS[program.optimizer](self.net.parameters())
        fd.distribute(self.net, self.optimizer, fd.Plan(zero=zero))
        self.object = _Object()

    def train(self) -> None:
        """Make a step: all ranks have the same batch, and noise of their own."""
        self.step += 1
        draw = torch.Generator().manual_seed(self.program.seed * 100 + self.step)
        inputs, targets = torch.randn(4, 6, generator=draw), torch.randn(4, 2, generator=draw)
        self.optimizer.zero_grad()
        (self.net(inputs) - targets).square().mean().backward()
        self.optimizer.step()
        self.net.draw_buffers(self.program.seed, self.step)
        self.object.state = self.state_of(self.here.rank, self.step)

    def state_of(self, rank: int, step: int) -> Any:
        """Return what the object of a rank holds after a step."""
        dice = random.Random(f"{self.program.seed} {rank} {step}")
        return {number: draw_value(dice) for number in range(dice.randint(0, 3))}

    def prints(self) -> dict[str, str]:
        """Return a fingerprint of each parameter and buffer, and of what the optimizer keeps: of whole tensors."""
        found = {name: _print_of(tensor) for name, tensor in self.net.state_dict().items()}
        names = [name for name, _ in self.net.named_parameters()]
        for index, values in self.optimizer.state_dict()["state"].items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    found[f"{names[index]}/{key}"] = _print_of(value)
        return found


def _print_of(tensor: torch.Tensor) -> str:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(bits_of(tensor)).hexdigest()[:16] + f" {tensor.dtype} {tuple(tensor.shape)}"


# -- on the ranks -------------------------------------------------------------------------------------------


def _note(program: SavedProgram, folder: Path) -> None:
    """Train as if nothing happened, and note what is held after each step."""
    training = _Training(program, program.zero)
    truth = []
    for _ in range(program.steps + 2):
        truth.append(training.prints())
        training.train()
    if training.here.rank == 0:
        (folder / "noting").write_text(json.dumps(truth))
        (folder / "noting").rename(folder / "truth.json")


def _note_and_save(program: SavedProgram, folder: Path) -> None:
    """Train once to know what is right, and once more, saving."""
    _note(program, folder)
    training = _Training(program, program.zero)
    saver = fd.Checkpointer(
        folder / "saved",
        training.net,
        training.optimizer,
        every_steps=program.every,
        keep=program.keep,
        asynchronous=program.is_async,
        object=training.object,
    )

    def report(step: int) -> None:
        if training.here.rank == 0:
            (folder / f"reported-{step}").touch()

    for _ in range(program.steps):
        training.train()
        saver.after_step(training.step)
        if not program.is_async and training.step % program.every == 0:
            report(training.step)
    saver.close()
    report(program.steps // program.every * program.every)


def _go_on(program: SavedProgram, folder: Path) -> None:
    """Load, compare, train a step, save, and load that too."""
    truth = json.loads((folder / "truth.json").read_text())
    training = _Training(program, program.later_zero, is_new=False)
    saver = fd.Checkpointer(
        folder / "saved", training.net, training.optimizer, asynchronous=False, object=training.object
    )
    step = saver.load()
    if step is None:
        _say(training, folder, {"step": 0})
        return
    training.step = step
    _require_prints(training, truth[step], f"after loading step {step}")
    source = training.here.rank if training.here.rank < program.ranks else 0
    wrong = difference(training.state_of(source, step), training.object.state)
    assert not wrong, f"the object of rank {source} at step {step}: {wrong}"
    training.train()
    if program.goes_on_alike:
        _require_prints(training, truth[step + 1], f"a step after loading step {step}")
    held = training.prints()
    saver.save(training.step)
    saver.close()
    again = _Training(program, program.later_zero, is_new=False)
    found = fd.load(folder / "saved", again.net, again.optimizer, object=again.object)
    assert found == step + 1, f"what was saved after step {step} is step {found}"
    _require_prints(again, held, f"after saving and loading step {step + 1}")
    _say(training, folder, {"step": step})


def _say(training: _Training, folder: Path, what: dict[str, Any]) -> None:
    if training.here.rank == 0:
        (folder / "said.json").write_text(json.dumps(what))


def _require_prints(training: _Training, expected: dict[str, str], when: str) -> None:
    found = training.prints()
    wrong = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
    assert not wrong, f"{when}: {wrong[0]} is {found.get(wrong[0])}, not {expected.get(wrong[0])}"


# -- from outside -------------------------------------------------------------------------------------------


def check(program: SavedProgram, folder: Path) -> str:
    """Play a program in an empty folder; return what is wrong, or nothing."""
    dice = random.Random(program.seed + 1)
    killer = dice if program.event == "kill" else None
    codes = _play(_note_and_save, program, program.ranks, folder, killer=killer)
    if any(codes) and (killer is None or not (folder / "truth.json").exists()):
        return f"training and saving ended with {codes}"
    saved = folder / "saved"
    before = saved_steps(saved) if saved.exists() else []
    reported = max((int(path.name.partition("-")[2]) for path in folder.glob("reported-*")), default=0)
    if reported > max(before, default=0):
        return f"step {reported} was reported, and there are {before}"
    is_damaged = program.event in ("flip", "cut", "missing") and bool(before)
    if is_damaged:
        _damage(step_directory(saved, before[-1]), program.event, dice)
    whole = before[:-1] if is_damaged else before
    is_listed = saved.exists() and saved_steps(saved) == before  # without its manifest it is none
    codes = _play(_go_on, program, program.later_ranks, folder)
    if is_damaged and is_listed and not whole:
        log = (folder / "log").read_text()
        return "" if all(codes) and "CheckpointError" in log else f"all is damaged, and loading ended with {codes}"
    if any(codes):
        return f"going on ended with {codes}"
    step = json.loads((folder / "said.json").read_text())["step"]
    if step != max(whole, default=0):
        return f"step {step} was loaded; there are {before}, the last is damaged: {is_damaged}"
    for left in saved_steps(saved):
        if left != (before[-1] if is_damaged else None):
            verify_checkpoint(saved, left)
    return ""


def _damage(directory: Path, event: str, dice: random.Random) -> None:
    path = dice.choice(sorted(each for each in directory.iterdir() if each.stat().st_size))
    content = bytearray(path.read_bytes())
    if event == "flip":
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    elif event == "cut":
        del content[dice.randrange(len(content)) :]
    path.unlink()
    if event != "missing":
        path.write_bytes(content)


def _play(
    play: Callable[[SavedProgram, Path], None],
    program: SavedProgram,
    ranks: int,
    folder: Path,
    *,
    killer: random.Random | None = None,
) -> list[int]:
    """Play on so many ranks; `killer` kills one or all while they save. Return exit codes."""
    port = free_port()

    def played() -> None:
        play(program, folder)
        fd.shutdown()  # rank 0 serves the others' store until all are here

    children = [forked(played, rank, ranks, port, folder / "log") for rank in range(ranks)]
    if killer is not None:
        begin = time.monotonic()
        while not (folder / "truth.json").exists() and time.monotonic() < begin + _SECONDS / 2:
            time.sleep(0.001)
        time.sleep(killer.uniform(0.0, 1.5) * (time.monotonic() - begin))
        for child in children if killer.random() < 0.5 else [killer.choice(children)]:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    return wait_for(children, _SECONDS)


def main(arguments: Sequence[str]) -> int:
    """Play programs; print those that fail, and a line of figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="an empty directory to work in")
    parser.add_argument("--seeds", default="0:50", help="first:end")
    options = parser.parse_args(arguments)
    import_all()
    torch.set_num_threads(1)
    first, end = (int(each) for each in options.seeds.split(":"))
    faults = []
    for seed in range(first, end):
        folder = options.directory / str(seed)
        folder.mkdir(parents=True)
        program = draw(seed)
        try:
            wrong = check(program, folder)
        except fd.FarandoleError as problem:
            wrong = f"{type(problem).__name__}: {problem}"
        if wrong:
            faults.append({"program": program._asdict(), "wrong": wrong, "log": _tail(folder / "log")})
        shutil.rmtree(folder)
    print(json.dumps({"programs": end - first, "faults": faults}))
    return int(bool(faults))


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[:3000] if log.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
