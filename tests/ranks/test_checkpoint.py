"""`fd.save`, `fd.load` and `fd.Checkpointer` on real ranks: training goes on bit for bit, or says why not."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.checkpoint.directory import DirectoryLock, saved_steps, step_directory
from farandole.checkpoint.listing import verify_checkpoint
from farandole.checkpoint.manifest import NAME
from farandole.comm.world.store_sync import BackgroundStore, all_gather_json
from farandole.core.vocabulary.errors import CheckpointError, PeerLost
from farandole.observe.diagnose.verdict import diagnose
from farandole.observe.records.progress import progress_line
from farandole.train.checkpoint import saver
from farandole.train.verify.verify import fingerprint
from tests.ranks.pool import ranks, takes

WIDTH = 127
STEPS = 6
CODECS = ("none", "int8:rounding=stochastic", "int4", "topk:0.05,momentum=0.5", "powersgd:4", "sign")


class Run:
    """A training with all that a resume needs: dropout, schedule, loader, scaler of the loss, a codec."""

    def __init__(self, codec: str = "none", seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(
            nn.Linear(WIDTH, 129), nn.Dropout(0.2), nn.Tanh(), nn.Linear(129, 67), nn.Tanh(), nn.Linear(67, 3)
        )
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), 0.01)
        plan = fd.Plan() if codec == "none" else fd.Plan(codec=codec)
        fd.distribute(self.model, self.optimizer, plan)
        generator = torch.Generator().manual_seed(5)
        x, y = torch.randn(96, WIDTH, generator=generator), torch.randn(96, 3, generator=generator)
        self.loader: Any = fd.shard(DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True), seed=3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=60)
        self.others: Any = {"loader": self.loader, "scheduler": self.scheduler}
        self.losses: list[float] = []

    def train(self, first: int, last: int, checkpointer: fd.Checkpointer | None = None) -> None:
        step = first
        while step <= last:
            for x, y in self.loader:
                noise = random.random() + float(torch.rand(()))
                loss = nn.functional.mse_loss(self.model(x), y) * (1 + 0.01 * noise)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.losses.append(loss.item())
                if checkpointer is not None:
                    checkpointer.after_step(step)
                step += 1
                if step > last:
                    return

    @property
    def bits(self) -> list[str]:
        state = [fingerprint(each) for each in self.model.state_dict().values()]
        moments = [each["exp_avg_sq"] for each in self.optimizer.state.values()]
        return [*map(str, state), *(str(fingerprint(each)) for each in moments)]


@pytest.mark.gate_cases("1")
@takes(90)
@ranks(1, 2, 3, 4)
def test_a_resumed_run_is_bitwise_the_same(tmp_path: Path) -> None:
    here = fd.init()
    for codec in CODECS if here.size == 2 else CODECS[1:4:2]:
        fd.seed(11, per_rank=True)
        directory = tmp_path / codec[:4]
        run = Run(codec)
        checkpointer = fd.Checkpointer(directory, run.model, run.optimizer, every_steps=1, **run.others)
        run.train(1, STEPS, checkpointer)
        checkpointer.close()
        for stop in (1, 3, STEPS - 1):
            fd.seed(99 + stop)
            again = Run(codec, seed=2)
            if stop == 3:  # as a process that had trained before
                again.train(1, 1)
                again.losses.clear()
            assert fd.load(directory, again.model, again.optimizer, step=stop, **again.others) == stop
            again.train(stop + 1, STEPS)
            assert again.losses == run.losses[stop:], f"{codec} from step {stop}"
            assert again.bits == run.bits, f"{codec} from step {stop}"


@ranks(1, 2, 3)
def save_on(tmp_path: Path) -> None:
    fd.init()
    fd.seed(4, per_rank=True)
    run = Run("topk:0.05" if fd.world().size > 1 else "none")
    run.train(1, 3)
    assert fd.save(tmp_path / "run", run.model, run.optimizer, step=3, **run.others) == 3
    if fd.world().is_main:
        torch.save([run.model.state_dict(), run.optimizer.state_dict()], tmp_path / "expected.pt")


@ranks(1, 2, 4)
def load_on(tmp_path: Path) -> None:
    fd.init()
    run = Run("topk:0.05" if fd.world().size > 1 else "none", seed=8)
    fd.load(tmp_path / "run", run.model, run.optimizer, **run.others)
    model, optimizer = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert all(torch.equal(each, model[name]) for name, each in run.model.state_dict().items())
    for index, state in optimizer["state"].items():
        for key, value in run.optimizer.state_dict()["state"][index].items():
            assert torch.equal(value, state[key]), (index, key)
    assert run.scheduler.last_epoch == 3
    draws = all_gather_json(fd.world(), "test/draws", [random.random(), float(torch.rand(()))])
    assert len({str(each) for each in draws}) == fd.world().size, "ranks draw alike"
    run.train(4, 5)
    alone = nn.Linear(WIDTH, 129)
    model_alone = nn.Sequential(alone, nn.Dropout(), nn.Tanh(), nn.Linear(129, 67), nn.Tanh(), nn.Linear(67, 3))
    before = torch.get_rng_state()
    fd.load(tmp_path / "run", model_alone)
    assert torch.equal(before, torch.get_rng_state()), "a model alone is no resume"
    assert torch.equal(alone.weight, model["0.weight"])


@pytest.mark.gate_cases("1-4")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 4), (2, 1)])
def test_another_number_of_ranks_goes_on(tmp_path: Path, before: int, after: int) -> None:
    save_on(tmp_path=tmp_path, world_size=before)
    load_on(tmp_path=tmp_path, world_size=after)


@ranks(2)
def test_every_byte_is_written_once_and_shared(tmp_path: Path) -> None:
    fd.init()
    model = nn.Linear(1500, 1000)
    twin = nn.ModuleDict({"a": model, "b": model, "bias": nn.Linear(1500, 1000)})
    fd.save(tmp_path, twin, step=1)
    manifest = verify_checkpoint(tmp_path, 1)
    sizes = [each.nbytes - each.header_bytes for each in manifest.files.values()]
    assert abs(sizes[0] - sizes[1]) < 20_000, sizes
    assert sum(sizes) < 2 * 4 * 1_501_000 + 40_000, "tied parameters are one tensor"


def sharded(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 5))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def train_sharded(model: Any, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(10 * seed + fd.world().rank)
        model(torch.randn(4, 33, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.full("further")
@ranks(2)
def test_fsdp2_resumes_and_loads_into_a_plain_model_and_back(tmp_path: Path) -> None:
    fd.init()
    model, optimizer = sharded(1)
    train_sharded(model, optimizer, range(3))
    fd.save(tmp_path, model, optimizer, step=3)
    full = {name: each.full_tensor() for name, each in model.state_dict().items()}
    train_sharded(model, optimizer, range(3, 5))

    again, its_optimizer = sharded(2)
    assert fd.load(tmp_path, again, its_optimizer) == 3
    train_sharded(again, its_optimizer, range(3, 5))
    for mine, other in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local())
        state = its_optimizer.state[mine]["exp_avg"]
        assert isinstance(state, DTensor)
        assert torch.equal(state.to_local(), optimizer.state[other]["exp_avg"].to_local())

    plain: Any = nn.Sequential(nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 5))
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    fd.load(tmp_path, plain, plain_optimizer)
    assert all(torch.equal(each, full[name]) for name, each in plain.state_dict().items())
    assert plain_optimizer.param_groups[0]["lr"] == 0.01
    fd.save(tmp_path / "plain", plain, plain_optimizer, step=4)
    back, back_optimizer = sharded(3)
    fd.load(tmp_path / "plain", back, back_optimizer)
    assert all(torch.equal(each.full_tensor(), full[name]) for name, each in back.state_dict().items())


def error_of(call: Any) -> str:
    """Return the text of the `CheckpointError` that every rank gets."""
    with pytest.raises(CheckpointError) as caught:
        call()
    texts = all_gather_json(fd.world(), "test/error", [str(caught.value), caught.value.exit_code])
    assert all(each == texts[0] for each in texts), texts
    assert caught.value.exit_code == 2, caught.value
    return str(caught.value)


def on_main(act: Any) -> None:
    if fd.world().is_main:
        act()
    fd.barrier()


@pytest.mark.full("slow")
@takes(60)
@ranks(2)
def test_bad_input_is_one_error_on_every_rank_and_changes_nothing(tmp_path: Path) -> None:
    here = fd.init()
    run = Run()
    run.train(1, 1)
    fd.save(tmp_path, run.model, run.optimizer, step=1, **run.others)
    run.train(2, 2)
    fd.save(tmp_path, run.model, run.optimizer, step=2, **run.others)
    other = nn.Sequential(nn.Linear(WIDTH, 129), nn.Linear(129, 8), nn.Linear(8, 3), nn.Linear(3, 1))
    before = {name: each.clone() for name, each in other.state_dict().items()}
    text = error_of(lambda: fd.load(tmp_path, other))
    assert "model.1.weight is nothing in the checkpoint and float32(8, 129) here" in text
    assert "is of another training" in text
    assert "more" in text
    assert all(torch.equal(each, before[name]) for name, each in other.state_dict().items())
    bits = run.bits

    def load(**options: Any) -> Any:
        return lambda: fd.load(tmp_path, run.model, run.optimizer, **options)

    assert "no schedule in the checkpoint" in error_of(load(schedule=run.scheduler))
    assert "no checkpoint of step 9, only of 1, 2" in error_of(load(step=9))
    assert "no such directory" in error_of(lambda: fd.load(tmp_path / "none", run.model))
    folder = step_directory(tmp_path, 2)
    file = sorted(folder.glob("*.safetensors"))[1]
    whole = file.read_bytes()
    fd.barrier()
    for content, what in (
        (whole[:-60] + bytes([whole[-60] ^ 1]) + whole[-59:], "have changed"),
        (whole[:-1], "truncated"),
        (whole[:9] + b"X" + whole[10:], "header has changed"),
    ):
        on_main(lambda content=content: file.write_bytes(content))
        text = error_of(load(**run.others))
        assert what in text
        assert "load the last good one: step=1" in text
    on_main(file.unlink)
    assert "cannot read" in error_of(load())
    checkpointer = fd.Checkpointer(tmp_path, run.model, run.optimizer, **run.others)
    assert run.bits == bits
    assert checkpointer.load() == 1
    checkpointer.close()
    manifest = step_directory(tmp_path, 1) / NAME
    on_main(lambda: manifest.write_bytes(manifest.read_bytes().replace(b'"step":1', b'"step":7')))
    assert "is damaged: its hash" in error_of(load(step=1))

    lock = DirectoryLock(tmp_path / "busy", "another", "0" * 32) if here.is_main else None
    fd.barrier()
    assert "written by another job: process" in error_of(lambda: fd.save(tmp_path / "busy", run.model, step=1))
    if lock is not None:
        lock.release()
    on_main(lambda: (tmp_path / "file").write_text(""))
    assert "cannot write checkpoints to" in error_of(lambda: fd.save(tmp_path / "file", run.model, step=1))
    own = tmp_path / f"rank{here.rank}"
    assert "is not the directory that rank 0 sees" in error_of(lambda: fd.save(own, run.model, step=1))


@pytest.mark.full("further")
@ranks(2)
def test_ranks_that_count_by_other_optimizers_save_one_step(tmp_path: Path) -> None:
    """Rank 1 still holds an earlier training, whose optimizer leads there; a step that is given must be equal."""
    here = fd.init()
    earlier: Run | None = Run()
    if here.rank == 0:
        earlier = None
        gc.collect()
    run = Run(seed=2)
    run.train(1, 2)
    done = all_gather_json(here, "test/steps", here.session.steps.done)
    assert done == [2, 0], "the counts differ"
    assert fd.save(tmp_path, run.model, run.optimizer) == 2
    assert saved_steps(tmp_path) == [2]
    with pytest.raises(CheckpointError, match="different steps: 5 on rank 0, 6 on rank 1"):
        fd.save(tmp_path, run.model, run.optimizer, step=5 + here.rank)
    assert saved_steps(tmp_path) == [2]
    del earlier


@ranks(2)
def test_values_without_a_form_are_refused_by_name(tmp_path: Path) -> None:
    fd.init()

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"rule": [lambda: 1] if fd.world().rank else []}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    text = error_of(lambda: fd.save(tmp_path, nn.Linear(2, 2), step=1, odd=Odd()))
    assert text.startswith("rank 1: the state at odd/rule/0 is a builtins.function")
    assert saved_steps(tmp_path) == []
    assert "odd is a int, which has no state_dict" in error_of(
        lambda: fd.save(tmp_path, nn.Linear(2, 2), step=1, odd=3)
    )


@ranks(2)
def test_a_busy_writer_is_waited_for_or_the_save_is_skipped(tmp_path: Path) -> None:
    here = fd.init()
    model = nn.Linear(64, 64)
    checkpointer = fd.Checkpointer(tmp_path, model, keep=2, keep_every=4, if_busy="skip")
    writer = checkpointer._saver._writer._process
    assert writer is not None
    if here.rank == 1:
        os.kill(writer.pid, signal.SIGSTOP)
    fd.barrier()
    assert checkpointer.save(4)
    assert not checkpointer.save(5), "on both ranks, though one of them was stopped"
    assert saved_steps(tmp_path) == []
    with torch.no_grad():
        expected = model.weight.clone()
        model.weight.zero_()
    if here.rank == 1:
        os.kill(writer.pid, signal.SIGCONT)
    checkpointer._wait()
    for step in (6, 7, 8, 9):
        checkpointer.save(step)
        checkpointer._wait()
    checkpointer.close()
    assert saved_steps(tmp_path) == [4, 8, 9]
    fd.load(tmp_path, model, step=4)
    assert torch.equal(model.weight, expected), "it was copied before the training went on"


@ranks(2)
def test_a_preempted_job_saves_and_stops_on_all_ranks(tmp_path: Path) -> None:
    here = fd.init()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    from farandole.train import preemption

    try:
        run = Run()
        checkpointer = fd.Checkpointer(tmp_path, run.model, run.optimizer, every_minutes=1e-9, **run.others)
        assert not checkpointer.after_step(1)
        if here.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert checkpointer.after_step(2)
        assert saved_steps(tmp_path) == [1, 2]
        assert checkpointer.after_step(2)
        checkpointer.close()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        preemption._warning = preemption._WarningSignal()


@pytest.mark.full("further")
@ranks(2)
def test_a_writer_that_is_killed_is_an_alarm_and_the_next_save_works(tmp_path: Path) -> None:
    here = fd.init(run_dir=tmp_path / "run")
    run = Run()
    checkpointer = fd.Checkpointer(tmp_path, run.model, run.optimizer, every_steps=1)
    run.train(1, 1, checkpointer)
    checkpointer._wait()
    writer = checkpointer._saver._writer._process
    assert writer is not None
    if here.rank == 1:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        checkpointer._saver._writer.start = lambda: None  # type: ignore[method-assign]
    run.train(2, 2, checkpointer)
    while not checkpointer._under_way.is_done:  # type: ignore[union-attr]
        time.sleep(0.01)

    checkpointer._wait()
    assert saved_steps(tmp_path) == [1]
    if here.rank == 1:
        del checkpointer._saver._writer.start
    run.train(3, 3, checkpointer)
    checkpointer.close()
    assert saved_steps(tmp_path) == [1, 3]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", place], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


@ranks(2)
def fill_disk(place: Path, run_directory: Path) -> None:
    here = fd.init(run_dir=run_directory)
    model = nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer)
    checkpointer = fd.Checkpointer(place, model, optimizer, every_steps=1)

    def step(number: int) -> None:
        model(torch.randn(2, 500)).mean().backward()
        optimizer.step()
        if number:
            checkpointer.after_step(number)

    step(1)
    checkpointer._wait()
    on_main(lambda: (place / "ballast").write_bytes(bytes(1_500_000)))
    step(2)
    step(3)  # training goes on
    checkpointer._wait()
    assert saved_steps(place) == [1]
    verify_checkpoint(place, 1)
    assert [each.name for each in place.iterdir() if each.name.startswith("step")] == ["step-00000001"]
    step(4)
    checkpointer._wait()
    time.sleep(0.15)  # a row of progress covers at least 0.1 s
    step(5)
    checkpointer._wait()
    on_main((place / "ballast").unlink)
    step(6)
    checkpointer.close()
    assert saved_steps(place) == [1, 6]
    time.sleep(0.15)
    step(0)
    on_main(lambda: (place / "ballast").write_bytes(bytes(1_000_000)))
    with pytest.raises(CheckpointError, match="No space left on device"):
        fd.save(place, model, optimizer, step=7)
    checkpointer = fd.Checkpointer(place, model, optimizer, every_steps=1, asynchronous=False)
    step(8)
    assert saved_steps(place) == [1, 6]
    checkpointer.close()
    fd.shutdown()
    if here.is_main:
        assert "ALARM: step 8 was not saved" in diagnose(run_directory).notes[0]
        rows = [json.loads(row) for row in (run_directory / "metrics.jsonl").read_text().splitlines()]
        alarms = {row["step"]: row.get("alarm", "") for row in rows if row["kind"] == "step"}
        assert alarms[5].startswith("step 4 was not saved: rank"), alarms
        assert alarms[7] == "", alarms
        assert "ALARM: step 4" in progress_line({**rows[0], "alarm": alarms[5]})


@pytest.mark.full("further")
@pytest.mark.timeout(120)
def test_training_goes_on_when_the_disk_is_full(small_disk: Path, tmp_path: Path) -> None:
    fill_disk(place=small_disk, run_directory=tmp_path / "run")


class Refuses:
    """A part of a training whose state cannot be read on one rank, for a reason of its own."""

    def state_dict(self) -> dict[str, int]:
        if fd.world().rank == 0:
            raise RuntimeError("no state today")
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("nothing was saved")


@ranks(2)
def test_any_error_of_one_rank_is_known_to_all_at_once(tmp_path: Path) -> None:
    """The rank that has it raises it as it is; the other one would wait for the time-out."""
    here = fd.init()
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError if here.rank else RuntimeError, match="no state today") as caught:
        fd.save(tmp_path, model, step=1, part=Refuses())
    if here.rank:
        assert "rank 0: RuntimeError: no state today" in str(caught.value)
    assert fd.save(tmp_path, model, step=2) == 2


@pytest.mark.parametrize("is_whole", [True, False])
@ranks(2)
def test_a_rank_that_is_late_is_not_told_that_a_whole_checkpoint_is_gone(tmp_path: Path, is_whole: bool) -> None:
    """A save is the last call, rank 0 has committed and ended, and with it the store."""
    here = fd.init()
    model, take = nn.Linear(2, 2), BackgroundStore.take

    def take_late(store: BackgroundStore, key: str, what: str, timeout_seconds: float) -> str:
        said = take(store, key, what, timeout_seconds)
        if here.rank and key.endswith("/end"):
            raise PeerLost("the store, which rank 0 serves, is gone", rank=1, operation=key)
        return said

    def commit_nothing(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundStore, "take", take_late)
        patch.setattr(saver, "_SEEN_SECONDS", 0.5)
        if not is_whole:
            patch.setattr(saver, "commit_manifest", commit_nothing)
            with pytest.raises(
                CheckpointError, match="which rank 0 serves, is gone" if here.rank else "No space left"
            ):
                fd.save(tmp_path, model, step=1)
            return
        assert fd.save(tmp_path, model, step=1) == 1
    verify_checkpoint(tmp_path, 1)


class Kept:
    """An object with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@ranks(1)
def test_tensors_whose_paths_are_alike_stay_apart(tmp_path: Path) -> None:
    fd.init()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer)
    one, two, three = torch.ones(2), torch.zeros(2), torch.full((3,), 3.0)
    states: list[Any] = [
        {1: one, "1": two}, {None: one, "None": two, "None~2": three}, {(1, 2): one, "(1, 2)": two},
        {"a/b": one, "a": {"b": two}}, {"torch": one, "numpy": {"1": two}, "weight": three},
    ]  # fmt: skip
    for name in ("part", "random", "exchange", "model/weight"):
        for step, state in enumerate(states):
            weight, random_state = model.weight.detach().clone(), torch.get_rng_state()
            fd.save(tmp_path, model, optimizer, step=step, **{name: Kept(state)})
            nn.init.zeros_(model.weight)
            found = Kept()
            fd.load(tmp_path, model, optimizer, step=step, **{name: found})
            assert repr(found.state) == repr(state), name
            assert model.weight.equal(weight)
            assert torch.get_rng_state().equal(random_state)


@ranks(2)
def test_what_was_changed_on_purpose_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """Its manifest proves itself: only what it says is wrong."""
    here = fd.init()
    run = Run()
    run.train(1, 2)
    fd.save(tmp_path, run.model, run.optimizer, step=1, **run.others)
    path = step_directory(tmp_path, 1) / NAME
    whole = path.read_bytes()
    bits, random_state = run.bits, torch.get_rng_state()

    def exp_avg_is_a_bias(body: Any) -> None:
        states = body["shared"]["optimizers"]["optimizer"]["state"]
        states["model/0.weight"]["exp_avg"] = {"$tensor": "model/0.bias"}

    def optimizer_of(body: Any) -> Any:
        return body["shared"]["optimizers"]["optimizer"]

    def first_state(body: Any) -> Any:
        return optimizer_of(body)["state"]["model/0.weight"]

    changes: dict[str, Any] = {
        "exp_avg of model/0.weight has the shape": exp_avg_is_a_bias,
        "states of random numbers cannot be continued": lambda body: body["ranks"][0]["random"].update(python=1),
        "a value [$]bytes of a checkpoint cannot be read": lambda body: body["ranks"][0]["others"].update(
            scheduler={"$bytes": "!"}
        ),
        "state of scheduler cannot be loaded: TypeError": lambda body: body["ranks"][0]["others"].update(
            scheduler=5
        ),
        "state of optimizer cannot be loaded: KeyError: 'step'": lambda body: first_state(body).pop("step"),
        "state of optimizer cannot be loaded: .*float": lambda body: first_state(body).update(step={"x": 1}),
        "state of optimizer cannot be loaded: KeyError: 'model/1": lambda body: optimizer_of(body)["state"].update(
            {"model/1": {}}
        ),
        "the optimizer 'optimizer' is not whole": lambda body: optimizer_of(body).pop("other_state"),
        "have no lists of parameters": lambda body: optimizer_of(body)["groups"][0].update(params=[[]]),
        "model.0.weight is a value that is no tensor": lambda body: body["shared"]["modules"]["model"].update(
            {"0.weight": 1.5}
        ),
        "no states of random numbers": lambda body: body["ranks"][0].pop("random"),
        "cannot be continued: IndexError": lambda body: body["ranks"][0]["random"].update(numpy={"$tuple": []}),
        "cannot be continued: OverflowError": lambda body: body["ranks"][0]["random"].update(
            seed={"$float": "inf"}
        ),
        "is damaged: ValueError: the degrees of a mesh": lambda body: body["shared"].update(degrees={"x": 1}),
        "is damaged: ValueError: 0 ranks' values": lambda body: body.update(ranks=[], world_size=0),
    }
    for text, change in changes.items():
        fd.barrier()
        if here.is_main:
            body = json.loads(b"{" + whole.split(b"\n", 1)[1])
            change(body)
            rest = json.dumps(body)[1:].encode()
            path.write_bytes(b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest)
        fd.barrier()
        with pytest.raises(CheckpointError, match=text):
            fd.load(tmp_path, run.model, run.optimizer, step=1, **run.others)
        assert run.bits == bits
        assert torch.get_rng_state().equal(random_state)
