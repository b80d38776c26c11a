"""The directory of a run's checkpoints: which there are, and how one is added or removed.

[Note: one rename] The files of a checkpoint are complete and on the disk (fsync of each file and of its
directory) before the manifest exists. The manifest is written under another name, fsynced, and renamed: that one
system call makes the checkpoint. To remove one, its manifest goes first. So a crash at any moment leaves whole
checkpoints, and files without a manifest that the next save clears away.

[Note: files of others] Other programs name directories ``step-00001000``, too, and users put notes beside a
checkpoint. Only names that this module makes are removed, through a descriptor of the directory that follows no
symbolic link. A directory with anything else in it stays.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..core.env import read_run_settings
from ..core.vocabulary.errors import CheckpointError
from .manifest import FILE, NAME, Manifest, parse_manifest

_STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_ASIDE = re.compile(rf"\.{re.escape(NAME)}\.[0-9a-f]{{16}}")
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def step_directory(directory: Path, step: int) -> Path:
    """Return the directory of the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def shard_name(rank: int, size: int, nonce: str) -> str:
    """Return the name of a rank's file. The nonce is the save's: a later save of the step changes no old file."""
    return f"rank-{rank:05d}-of-{size:05d}.{nonce}.safetensors"


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `directory`, ascending; none if there is no directory."""
    return [step for step in _steps(directory) if (step_directory(directory, step) / NAME).is_file()]


def read_manifest(directory: Path, step: int) -> Manifest:
    """Return the manifest of a step's checkpoint; raise `CheckpointError` if it is missing or damaged."""
    where = str(step_directory(directory, step) / NAME)
    return parse_manifest(read_manifest_bytes(directory, step), where, step)


def read_manifest_bytes(directory: Path, step: int) -> bytes:
    """Return the content of a step's manifest; raise `CheckpointError` if it cannot be read."""
    path = step_directory(directory, step) / NAME
    try:
        return path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}", is_input=True) from None


def make_step_directory(directory: Path, step: int) -> Path:
    """Make the directory of a step, and those above it, so that they outlive a crash. It may be there.

    Raises `CheckpointError` if it is a symbolic link: nothing is removed through one, see [Note: files of others].
    """
    path = step_directory(directory, step)
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link to {path.resolve()}, expected a directory of this run's",
            is_input=True,
            remedy="remove the link, or give another directory",
        )
    sync_directory(directory)
    return path


def commit_manifest(directory: Path, manifest: Manifest, nonce: str) -> None:
    """Make the checkpoint: write its manifest aside, fsync, rename, fsync. See [Note: one rename]."""
    path = step_directory(directory, manifest.step)
    aside = path / f".{NAME}.{nonce}"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path / NAME)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
    sync_directory(path)


def remove_checkpoint(directory: Path, step: int) -> list[str]:
    """Remove the checkpoint of a step, its manifest first. Raises `OSError`.

    Returns:
        The names of files that no save of ours made, sorted: they stay, and the directory with them.
    """
    with _opened(step_directory(directory, step)) as folder:
        with suppress(FileNotFoundError):
            os.unlink(NAME, dir_fd=folder)
            _sync_names(folder)
        _remove_ours(folder, set())
        others = _others(folder)
    _remove_if_empty(step_directory(directory, step))
    sync_directory(directory)
    return others


def remove_leftovers(directory: Path, step: int) -> None:
    """Remove files that saves of a step made and its manifest does not name.

    To be called by who holds the directory's lock. Without a manifest all of them go, and the directory with them
    if it is empty then. Raises `OSError`, and `CheckpointError` if the manifest is damaged; then nothing is
    removed.
    """
    path = step_directory(directory, step)
    with _opened(path) as folder:
        named = set()
        if (path / NAME).is_file():
            named = {NAME, *read_manifest(directory, step).files}
        if _remove_ours(folder, named) and not named:
            _remove_if_empty(path)


def set_aside(directory: Path, step: int) -> str:
    """Rename the checkpoint of a step, so that it counts no more; return its new name. Raises `OSError`."""
    count = 1
    while (aside := directory / f"superseded-{step:08d}{f'-{count}' if count > 1 else ''}").exists():
        count += 1
    step_directory(directory, step).rename(aside)
    sync_directory(directory)
    return aside.name


class Names(NamedTuple):
    """The names in a step's directory, sorted."""

    ours: list[str]
    """What saves made."""
    others: list[str]


def names_of(directory: Path, step: int) -> Names:
    """Return what is in a step's directory. Raises `OSError`, also where it is a symbolic link."""
    with _opened(step_directory(directory, step)) as folder:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - of a descriptor
    return Names([name for name in names if _is_ours(name)], [name for name in names if not _is_ours(name)])


def _is_ours(name: str) -> bool:
    return name == NAME or bool(FILE.fullmatch(name) or _ASIDE.fullmatch(name))


def _others(folder: int) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not _is_ours(name))


def _remove_ours(folder: int, named: set[str]) -> bool:
    """Remove what saves made, but not what is `named`; return whether the directory may go, too."""
    names = os.listdir(folder)
    ours = [name for name in names if _is_ours(name) and name not in named]
    for name in ours:
        os.unlink(name, dir_fd=folder)
    return bool(ours) or not names


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError as problem:
        if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yield a descriptor of a directory that is no symbolic link. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def all_steps(directory: Path) -> list[int]:
    """Return the steps that have a directory, complete or not, ascending."""
    return _steps(directory)


def steps_to_prune(steps: list[int], keep: int | None, keep_every: int | None) -> list[int]:
    """Return which of `steps`, as they were written, to remove: not the last `keep`, nor those of `keep_every`."""
    if keep is None:
        return []
    return [step for step in steps[: max(0, len(steps) - keep)] if not keep_every or step % keep_every]


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on the disk. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _sync_names(descriptor)
    finally:
        os.close(descriptor)


def _sync_names(folder: int) -> None:
    """Have the names in an open directory on the disk, as far as the file system offers that: some do not."""
    try:
        os.fsync(folder)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _steps(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise CheckpointError(f"cannot read {directory}: {problem.strerror or problem}", is_input=True) from None
    return sorted(int(match.group(1)) for name in names if (match := _STEP.fullmatch(name)))


# The lock of a directory of checkpoints: one job writes to it at a time.
#
# A lock of the kernel (``flock``), which goes with the process that holds it. The file says who that is.


LOCK = ".lock"
_WAIT_SECONDS, _AGAIN_SECONDS = 2.0, 100.0
"""For a holder that is ending; and in a job that began again, where it may be on a host that was lost: a file
server keeps the locks of that for its lease, 90 s as a rule."""


class DirectoryLock:
    """The lock of one directory, held until `release`."""

    def __init__(self, directory: Path, host: str, nonce: str) -> None:
        """Make the directory and lock it.

        Raises `CheckpointError` if another process holds it, naming that, or if the directory cannot be written.
        """
        try:
            directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            with suppress(PermissionError):  # /home and /scratch are often 0711: entered, and not read
                sync_directory(directory.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._descriptor = os.open(directory / LOCK, flags, FILE_MODE)
        except OSError as problem:
            raise CheckpointError(
                f"cannot write checkpoints to {directory}: {problem.strerror or problem}",
                is_input=True,
                remedy="give a directory that this user may write",
            ) from None
        try:
            self._take(directory)
            holder = {"host": host, "process": os.getpid(), "nonce": nonce, "time": time.strftime("%FT%T%z")}
            text = json.dumps(holder).encode()
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text, 0)
            os.fsync(self._descriptor)
        except OSError as problem:
            self.release()
            raise CheckpointError(f"cannot write {directory / LOCK}: {problem.strerror or problem}") from None
        except CheckpointError:
            self.release()
            raise

    def release(self) -> None:
        """Let others write. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _take(self, directory: Path) -> None:
        begins_again = read_run_settings().generation > 0
        end = time.monotonic() + (_AGAIN_SECONDS if begins_again else _WAIT_SECONDS)
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.05)
                    continue
                raise CheckpointError(
                    f"{directory} is written by another job: {_describe(self._descriptor)}",
                    is_input=True,
                    remedy="give each job a directory of its own",
                ) from None
            return


def read_nonce(directory: Path) -> str | None:
    """Return the nonce of who holds the lock, as seen from this host; None if there is none to be seen."""
    try:
        holder = json.loads((directory / LOCK).read_bytes())
    except (OSError, ValueError):
        return None
    nonce = holder.get("nonce") if isinstance(holder, dict) else None
    return nonce if isinstance(nonce, str) else None


def _describe(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['process']} on {holder['host']}, since {holder['time']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "its lock names no process"
