"""One rank's part of saving: the copy in memory now, files and manifest in the background.

[Note: a save] In the thread that trains: state, division of the work, copy. In a thread of its own: the copy of
what only the next optimizer step changes (`later_copy`), if the save is to go on in the background; the writer
writes and reports; rank 0 waits for all reports, commits the manifest and tells the others how it ended. Every
wait has an end. A save that fails leaves the checkpoints that were there; training goes on.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.directory import (
    DirectoryLock,
    all_steps,
    commit_manifest,
    make_step_directory,
    read_manifest,
    read_nonce,
    remove_checkpoint,
    remove_leftovers,
    saved_steps,
    set_aside,
    shard_name,
    step_directory,
    steps_to_prune,
)
from ...checkpoint.manifest import FileEntry, Manifest, PieceEntry, TensorEntry
from ...checkpoint.writer_client import Writer
from ...comm.world.session import RankChange
from ...comm.world.store_sync import BackgroundStore, all_gather_json
from ...comm.world.world import World
from ...core.env import read_run_settings
from ...core.vocabulary.errors import CheckpointError, FarandoleError
from ...core.vocabulary.events import CHECKPOINT, Phase
from ...core.vocabulary.run_files import SavesAccount
from ...core.vocabulary.text import write_notice
from ...parallel.model import DistributedModel
from ...parallel.pipeline.apply import refuse_open_batch
from ...sync.rows.table import tell_left_out
from ...version import VERSION
from ..equal_models import EqualModels
from .agreement import together, together_saying
from .later_copy import LaterCopies, LaterCopy, MemoryFile, WriterPool, copy_to_memory, whole_items
from .optimizers import Item, divide, local_items, plan_from_json
from .state import Training, TrainingState, meet_before, merge_shared, read_state

_SEEN_SECONDS = 5.0
"""For a shared file system to show on this host what another wrote."""


class Save:
    """A save in the background: `wait` for its end."""

    def __init__(self, step: int, finish: Callable[[], None]) -> None:
        self.step = step
        self.problem: CheckpointError | None = None
        self._finish = finish
        self._thread = threading.Thread(target=self._run, name="farandole-checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is on the disk; raise `CheckpointError` if it is not."""
        self._thread.join()
        if self.problem is not None:
            raise self.problem

    def _run(self) -> None:
        try:
            self._finish()
        except CheckpointError as problem:
            self.problem = problem
        except FarandoleError as problem:  # a peer that is lost: the training's own exchange says so too
            self.problem = CheckpointError(problem.message, remedy=problem.remedy)
        except OSError as problem:
            self.problem = CheckpointError(
                f"cannot write a checkpoint: {problem.strerror or problem}: {problem.filename or ''}"
            )
        except Exception as problem:  # a thread has no caller: `wait` tells
            self.problem = CheckpointError(f"cannot write a checkpoint: {type(problem).__name__}: {problem}")
        finally:
            del self._finish  # it knows the tensors that were saved


@dataclass(frozen=True, slots=True)
class _Work:
    """The part of a save that is done while training goes on."""

    step: int
    nonce: str
    name: str
    """The name of this rank's file."""
    file: MemoryFile
    state: TrainingState
    topic: str
    """Prefix of the messages about it in the store."""
    later: LaterCopy | None
    rank: int
    size: int
    store: BackgroundStore | None
    """That of the ranks that began it; some may be lost by its end."""


class Saver:
    """Saves the state of a training on this rank, as often as wished. To be made and used by all ranks alike."""

    def __init__(
        self, directory: Path, training: Training, here: World, after_commit: Callable[[], None] = lambda: None
    ) -> None:
        """Lock the directory, see that all ranks share it, and start the writer. Raises `CheckpointError`.

        `after_commit` is called on rank 0, in a thread, when a checkpoint is on the disk.
        """
        self._after_commit = after_commit
        here.session.call_on_close(self.close)
        here.session.call_in_forked_child(self.forget)
        here.session.follow_change(self.follow)
        self._directory, self._training, self._here = directory.absolute(), training, here
        self._pool = here.session.keep(WriterPool, lambda: WriterPool(here))
        self._writer = self._pool.take()
        self._under_way: Save | None = None
        self._is_closed, self._is_left = False, here.is_apart
        self._lock: DirectoryLock | None = None
        self._store: BackgroundStore | None = None
        self._count = 0
        self._copies = LaterCopies(self._note_wait)
        self._divided: tuple[list[str], list[list[Item]]] | None = None
        try:
            if not here.is_apart:  # the directory is locked by those that train
                self._open()
        except BaseException:
            self.close()
            raise

    def begin(self, step: int | None, *, copy_later: bool = False) -> Save:
        """Copy the state in memory and write it in the background. No other save may be under way.

        Args:
            step: the number of the checkpoint, the same on all ranks; None: the steps that rank 0 has done.
            copy_later: copy in the background, too, what the next optimizer step changes first.

        Raises:
            CheckpointError: on all ranks, before anything is written.
        """
        here = self._here
        self._meet_again()
        refuse_open_batch(self._training.model, "farandole.save")
        meet_before(self._training)
        if (models := here.session.kept(EqualModels)) is not None:
            models.require_equal(self._training.modules.values())
        tell_left_out(here, self._training.tables.keys())
        numbers = step, here.session.steps.done
        state, said = together_saying(here, "state", self._read_state, lambda found: _digests(found, numbers))
        if len({digests["copies"] for digests in said}) > 1:
            gc.collect()  # a module that is gone may still wait to be collected
            state, said = together_saying(here, "state", self._read_state, lambda found: _digests(found, numbers))
        if len({digests["numbers"][0] for digests in said}) > 1:
            each = ", ".join(f"{digests['numbers'][0]} on rank {rank}" for rank, digests in enumerate(said[:8]))
            raise CheckpointError(
                f"step: the ranks save different steps: {each}", is_input=True, remedy="give the same step on all"
            )
        # With several models, a rank counts by another optimizer than its neighbour while that one is alive.
        number = said[0]["numbers"][1] if step is None else step
        if len({digests["copies"] for digests in said}) > 1:
            raise CheckpointError(
                "a module that is not distributed differs between the ranks, and another one is divided over "
                "them: it may be a copy of a part of that",
                is_input=True,
                remedy="save the divided model itself, or values that are the same on all ranks",
            )
        shared = state[0].shared
        if any(digests["is_part"] for digests in said):
            order = list(self._training.names.values())
            shared = merge_shared(all_gather_json(here, "checkpoint/shared", shared), order)
        elif len({digests["shared"] for digests in said}) > 1:
            raise CheckpointError(
                "the ranks have different states: names or values of modules and optimizers differ",
                remedy="give the same model and optimizers on all ranks",
            )
        items, nonce = together_saying(
            here, "divide", lambda: self._divide(state, said), lambda _: secrets.token_hex(8)
        )
        name = shard_name(here.rank, here.size, nonce[0])
        later = self._copies.begin(state[0].stepped) if copy_later else None
        try:
            file = together(here, "copy", lambda: self._copy(number, items, state, later))
        except BaseException:
            if later is not None:
                later.end()
            raise
        self._count += 1
        whole = replace(state[0], shared=shared)
        topic = f"checkpoint/save/{self._token}/{self._count}"
        work = _Work(number, nonce[0], name, file, whole, topic, later, here.rank, here.size, self._store)
        if here.rank == 0:
            line_of(self._directory, here).begin(number)
        self._under_way = Save(number, lambda: self._finish(work))
        return self._under_way

    @property
    def writer(self) -> Writer:
        """The writer of this rank's file."""
        return self._writer

    def close(self) -> None:
        """Let other jobs write to the directory. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._copies.close()
            if self._here.closed or (self._under_way is not None and not self._under_way.is_done):
                self._writer.close()  # what it writes is no checkpoint any more
            else:
                self._pool.give_back(self._writer)
        if self._lock is not None:
            self._lock.release()

    def follow(self, change: RankChange) -> None:
        """Ranks were lost: the next save meets those that are left."""
        if self._lock is not None:
            self._lock.release()
        self._lock = self._store = self._divided = None
        self._is_left = not self._is_closed

    def _meet_again(self) -> None:
        """Open the directory for the ranks that are left. Raises `CheckpointError` on all of them."""
        if self._is_left:
            self._count = 0
            self._open()
            self._is_left = False

    def forget(self) -> None:
        """In a forked child: keep neither the lock nor the writer alive when the rank is gone."""
        self._copies.last = None  # the thread that copies is the parent's
        self._writer.forget()
        if self._lock is not None:
            self._lock.release()

    def _open(self) -> None:
        here = self._here

        def lock() -> None:
            if here.rank == 0:
                self._lock = DirectoryLock(self._directory, here.host, token)
                line_of(self._directory, here).begin(None)
                for step in all_steps(self._directory):
                    with suppress(OSError, CheckpointError):
                        remove_leftovers(self._directory, step)

        token = secrets.token_hex(16)
        _, said = together_saying(here, "lock", lock, lambda _: token)
        self._token: str = said[0]
        together(here, "directory", self._require_shared)
        together(here, "writer", self._writer.start)
        if here.size > 1:
            self._store = BackgroundStore(here)

    def _require_shared(self) -> None:
        end = time.monotonic() + _SEEN_SECONDS
        while read_nonce(self._directory) != self._token:
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{self._directory} on host {self._here.host} is not the directory that rank 0 sees",
                    is_input=True,
                    remedy="give a directory of a file system that all hosts share",
                )
            time.sleep(0.05)

    def _read_state(self) -> tuple[TrainingState, list[Item]]:
        state = read_state(self._training, self._here)
        self._writer.start()
        others = state.of_first if self._here.rank else frozenset()
        tensors = {name: each for name, each in state.tensors.items() if name not in others}
        return state, local_items(tensors, state.splits)

    def _divide(self, state: tuple[TrainingState, list[Item]], said: list[dict[str, Any]]) -> list[Item]:
        digests = [each["plan"] for each in said]
        if self._divided is None or self._divided[0] != digests:
            if len(set(digests)) == 1:
                plans = [state[1]] * self._here.size
            else:
                plans = [plan_from_json(each) for each in all_gather_json(self._here, "checkpoint/plan", state[1])]
            try:
                self._divided = digests, divide(plans)
            except ValueError as problem:
                raise CheckpointError(f"the shards of the ranks do not fit together: {problem}") from None
        return self._divided[1][self._here.rank]

    def _note_wait(self, seconds: float) -> None:
        now = time.monotonic()
        self._here.session.recorder.record(Phase(CHECKPOINT, now - seconds, now))

    def _copy(
        self, step: int, items: list[Item], state: tuple[TrainingState, list[Item]], later: LaterCopy | None
    ) -> MemoryFile:
        if self._here.rank == 0:
            make_step_directory(self._directory, step)
        tensors = {**state[0].tensors, **state[0].own_tensors}
        with torch.no_grad():
            boxes = [*items, *whole_items(state[0].own_tensors)]
            return copy_to_memory(boxes, tensors, self._writer, later, state[0].splits)

    def _finish(self, work: _Work) -> None:
        here = self._here
        try:
            if work.later is not None:
                self._copies.finish(work.later)
            path = step_directory(self._directory, work.step) / work.name
            hashes = self._writer.write(path, work.file.nbytes, work.file.ranges)
            report = work.file.describe(work.name, hashes, work.state.own)
        except CheckpointError as error:
            report = {"problem": error.message}
        if work.store is None:
            self._commit(work, [report])
        elif work.rank > 0:
            work.store.post(f"{work.topic}/{work.rank}", json.dumps(report))
            try:
                end = work.store.take(f"{work.topic}/end", "rank 0's manifest", 2 * here.timeout_seconds)
            except FarandoleError:
                if not self._is_committed(work):
                    raise
                return  # rank 0 has committed it and is gone: a save may be the last thing that a script does
            if problem := json.loads(end):
                raise CheckpointError(problem)
            line_of(self._directory, here).see(work.step)
        else:
            self._collect(work, report, work.store)

    def _is_committed(self, work: _Work) -> bool:
        """Return whether the manifest on the disk is that of this very save: its files have names of their own."""
        end = time.monotonic() + _SEEN_SECONDS
        while time.monotonic() < end:
            with suppress(OSError, CheckpointError):
                if work.name in read_manifest(self._directory, work.step).files:
                    return True
            time.sleep(0.05)
        return False

    def _collect(self, work: _Work, report: dict[str, Any], store: BackgroundStore) -> None:
        """On rank 0: wait for the others, commit, and tell them how it ended."""
        problem = "rank 0 did not write the manifest"
        try:
            reports = [report]
            for rank in range(1, work.size):
                key = f"{work.topic}/{rank}"
                what = f"rank {rank}'s file of a checkpoint"
                reports.append(json.loads(store.take(key, what, self._here.timeout_seconds)))
                store.remove(key)
            self._commit(work, reports)
            problem = ""
        except FarandoleError as error:
            problem = error.message
            raise
        except OSError as error:
            problem = f"cannot write a checkpoint: {error.strerror}: {error.filename}"
            raise
        finally:
            store.post(f"{work.topic}/end", json.dumps(problem))

    def _commit(self, work: _Work, reports: list[dict[str, Any]]) -> None:
        line = line_of(self._directory, self._here)
        failed = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(reports) if "problem" in each]
        try:
            if failed:
                raise CheckpointError(failed[0])
            plan = DistributedModel.of(self._training.model).plan
            manifest = make_manifest(
                work.step, reports, work.state.shared, None if plan is None else plan.to_mapping()
            )
            line.give_up_later(work.step)
            commit_manifest(self._directory, manifest, work.nonce)
        finally:
            with suppress(OSError, CheckpointError):
                remove_leftovers(self._directory, work.step)
        line.commit(work.step)
        self._after_commit()


def line_of(directory: Path, here: World) -> RunLine:
    """Return the line of a directory in this world."""
    return here.session.keep(Lines, Lines).of(directory)


def make_manifest(step: int, reports: list[dict[str, Any]], shared: Any, plan: Any) -> Manifest:
    """Return the manifest of what the ranks report to have written."""
    tensors: dict[str, TensorEntry] = {}
    for report in reports:
        for name, dtype, size, offsets, shape, begin, sha256 in report["pieces"]:
            piece = PieceEntry(report["file"], begin, tuple(offsets), tuple(shape), sha256)
            before = tensors[name].pieces if name in tensors else ()
            tensors[name] = TensorEntry(dtype, tuple(size), (*before, piece))
    return Manifest(
        step=step,
        world_size=len(reports),
        wall_time=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions={"farandole": VERSION, "torch": torch.__version__},
        plan=plan,
        files={
            each["file"]: FileEntry(each["bytes"], each["header_bytes"], each["header_sha256"]) for each in reports
        },
        tensors=tensors,
        shared=shared,
        ranks=tuple(each["own"] for each in reports),
    )


def _digests(state: tuple[TrainingState, list[Item]], numbers: tuple[int | None, int]) -> dict[str, Any]:
    texts = {"shared": state[0].shared, "plan": state[1]}
    return {"numbers": numbers, "copies": state[0].copies, "is_part": state[0].is_part} | {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for name, value in texts.items()
    }


# A run's line: the checkpoints that its state comes from, in the order in which they were written.
#
# [Note: lines] A directory may hold checkpoints of several lines. A run that loads step 100 and goes on gives up
# steps 200 and 300 that are there. Their numbers are higher than those of the saves that follow: by numbers alone
# they would be kept and resumed from, and the new ones removed. So the first save after a load sets aside what
# lies above the loaded step, before its own manifest is written. And only checkpoints of the line are removed to
# make room: what this process has loaded or written, and what lies below that.


class RunLine:
    """The line of one directory, on this rank. Rank 0 alone writes, loading is seen by all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._steps: list[int] = []
        self._left_at: int | None = None
        """The step that was loaded, until the save that follows."""
        self._account = SavesAccount(str(directory))

    def load(self, step: int) -> None:
        """Go on from the checkpoint of a step."""
        self._steps = [each for each in saved_steps(self.directory) if each <= step]
        self._left_at = step
        with suppress(OSError):  # removed meanwhile
            when = step_directory(self.directory, step).stat().st_mtime
            self._account = replace(self._account, whole=step, when_seconds=when)

    def give_up_later(self, step: int) -> None:
        """Before the first commit after a load, of `step`: set aside what lies above the loaded step."""
        left_at, self._left_at = self._left_at, None
        if left_at is None:
            return
        names = []
        for each in saved_steps(self.directory):
            if each > left_at and each != step:
                try:
                    names.append(set_aside(self.directory, each))
                except OSError as problem:
                    write_notice(f"ALARM: step {each} was given up and cannot be set aside: {problem}")
        if names:
            write_notice(
                f"in {self.directory}, step {left_at} was loaded: later checkpoints are of a line that was given "
                f"up, and are now {', '.join(names)}"
            )

    def see(self, step: int) -> None:
        """Take in the checkpoint that rank 0 has written: this rank may be the next rank 0."""
        self._left_at = None
        self._steps = [each for each in self._steps if each != step] + [step]

    def begin(self, step: int | None) -> None:
        """Tell the launcher that a save begins, or (None) that there will be some."""
        self._tell(replace(self._account, begun=step))

    def commit(self, step: int) -> None:
        """Take in the checkpoint that was just written."""
        self._steps = [each for each in self._steps if each != step] + [step]
        self._tell(replace(self._account, whole=step, when_seconds=time.time()))

    def _tell(self, account: SavesAccount) -> None:
        self._account = account
        account.write(read_run_settings().run_directory)

    def prune(self, keep: int | None, keep_every: int | None) -> None:
        """Remove the line's checkpoints but the last `keep`, and multiples of `keep_every`."""
        for step in steps_to_prune(self._steps, keep, keep_every):
            with suppress(OSError):  # it is tried again after the next save
                others = remove_checkpoint(self.directory, step)
                self._steps.remove(step)
                if others:
                    place = step_directory(self.directory, step)
                    write_notice(f"{place} stays: Farandole did not make {', '.join(others)}")


class Lines:
    """The lines of all directories that this process has loaded from or saved to."""

    def __init__(self) -> None:
        self._by_path: dict[str, RunLine] = {}

    def of(self, directory: Path) -> RunLine:
        """Return the line of a directory, however its path is written."""
        path = os.path.realpath(directory)
        if path not in self._by_path:
            self._by_path[path] = RunLine(Path(path))
        return self._by_path[path]
