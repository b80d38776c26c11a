"""The plan key ``offload = "disk"``: the states of an optimizer live in memory-mapped files.

[Note: a step by chunks] Optimizers of torch go over ``self.param_groups``. Before a step the optimizer that torch
calls is exchanged for a stand-in with the same state, whose groups are the true ones cut into chunks of
parameters. Each update is elementwise, so the result is the same, bit for bit, and temporary tensors are a
chunk's. While a chunk is updated the next one's pages are read ahead; after it, its pages are let go. The kernel
keeps them in its cache as long as there is memory, and writes them to the disk when there is not.

[Note: states come to the file] A state is made by the optimizer itself, or by loading, in memory. After its
chunk it is copied to the file, and the optimizer goes on with the copy. Freed memory goes back to the kernel then:
the C library would keep it, in pieces into which the next chunk's tensors may not fit.

[Note: states of shards] With ``zero`` a rank's file has the states of its shards. At stage 3 parameters and states
are DTensors, and their local part lies in the file. At stages 1 and 2 the groups hold this rank's rows while the
optimizer steps, and whole parameters otherwise, at the same places: the file is divided by the whole ones.

[Note: no name] The file is made by ``O_TMPFILE`` or, where the file system has none, unlinked as soon as it is
open, in a directory of its own that only this user can enter. So nothing is left behind, however the process
ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.hooks import RemovableHandle

from ...comm.engine.parameters import rows_of
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.bucket_plan import STATE_CHUNK_BYTES
from ...core.host.process_status import give_back_freed_memory, trim_heap
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import name_ranks
from ..model import Strategy

# A file without a name in a directory on disk, mapped into memory: what its pages hold need not stay in
# memory.
DEFAULT_DIRECTORY = Path("/var/tmp")
"""By the Filesystem Hierarchy Standard its files survive a reboot, so they are on a disk."""
PAGE_BYTES = mmap.PAGESIZE
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_FILE_MODE = 0o600


class DiskFile:
    """`nbytes` of a disk, as memory. Raises `OSError` if they are not there to have."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        descriptor = _open(directory)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            self._memory = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        finally:
            os.close(descriptor)

    def tensor(self, offset: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor on the bytes from `offset` on."""
        return torch.frombuffer(self._memory, dtype=dtype, count=elements, offset=offset)

    def fetch(self, offset: int, nbytes: int) -> None:
        """Begin to read pages that are used soon. `offset` is a page's."""
        self._memory.madvise(mmap.MADV_WILLNEED, offset, nbytes)

    def drop(self, offset: int, nbytes: int) -> None:
        """Let go of pages in this process; what was written to them is the kernel's to write to the disk."""
        self._memory.madvise(mmap.MADV_DONTNEED, offset, nbytes)


def why_unusable(directory: Path) -> str:
    """Return why files in `directory` would not be on a disk; empty if they would."""
    if not directory.is_dir():
        return f"{directory} is no directory"
    status = directory.stat()
    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields = line.split(" ")
        kind = fields[fields.index("-") + 1]
        if fields[2] == number and kind in _IN_MEMORY:
            return f"{directory} is in memory (a {kind}), not on a disk"
    return ""


def _open(directory: Path) -> int:
    """See [Note: no name]."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _FILE_MODE)
    except OSError as problem:
        if problem.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    folder = Path(tempfile.mkdtemp(dir=directory))
    try:
        path = folder / "states"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
        path.unlink()
    finally:
        folder.rmdir()
    return descriptor


KINDS = (Adam, AdamW, SGD, Adagrad, RMSprop)
"""Optimizers whose update is elementwise and goes over the groups once."""
_EXPECTED_CPU = "expected the CPU"


ShapeOf = Callable[[torch.Tensor], torch.Size]
"""Gives the shape of what this rank updates of a parameter: all of it, or its shard."""


def reserve_states(
    here: World, optimizers: Sequence[Optimizer], plan: Plan, shape_of: ShapeOf
) -> list[tuple[Optimizer, DiskStates]]:
    """Reserve room for the states of `optimizers` in the plan's directory; nothing moves yet.

    Raises `PlanError`, on every rank, for an optimizer of another kind or without states, for a directory that is
    not on a disk, and if the disk has no room for all states.
    """
    directory = Path(plan.offload_directory) if plan.offload_directory else DEFAULT_DIRECTORY
    made: list[tuple[Optimizer, DiskStates]] = []
    try:
        problem = _problem(optimizers) or why_unusable(directory)
        if not problem:
            made = [(each, DiskStates(each, directory, shape_of)) for each in optimizers]
    except OSError as raised:
        problem = f"{directory}: {raised.strerror}"
        if raised.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            nbytes = sum(_state_bytes(each, shape_of) for each in optimizers)
            problem += f", and the states are {nbytes} bytes a rank"
    answers = all_gather_json(here, "optimizer states on disk", problem)
    failed = [rank for rank, answer in enumerate(answers) if answer]
    if failed:
        where = "" if len(failed) == here.size else f"{name_ranks([here.job_ranks[rank] for rank in failed])}: "
        raise PlanError(
            f'plan: offload = "disk": {where}{answers[failed[0]]}',
            remedy='set offload = "none"'
            if _EXPECTED_CPU in answers[failed[0]]
            else 'set offload_directory to a directory on a disk with room, or offload = "none"',
        )
    give_back_freed_memory()  # what the heap keeps may be more than the states; see its [Note: freed memory stays]
    return made


class StatesOnDisk(Strategy):
    """The plan key ``offload = "disk"``."""

    keys = ("offload",)
    takes_own_parameters = True

    def check(self) -> None:
        """Reserve room: see `reserve_states`."""
        shape_of = shard_shape(self.mesh.here, self.plan)
        self._made = reserve_states(self.mesh.here, self.optimizers, self.plan, shape_of)

    def apply(self) -> None:
        """Let the optimizers step by chunks."""
        for optimizer, states in self._made:
            self.distributed.hooks += states.attach(optimizer)

    def finish(self) -> None:
        """Move the states that there are: at stages 1 and 2 they are those of rows now."""
        for optimizer, states in self._made:
            states.move_all(optimizer)


def shard_shape(here: World, plan: Plan) -> ShapeOf:
    """Return a function that gives the shape of this rank's shard of a parameter, which may be sharded already.

    Parameters without dimensions are whole, and so are all without ``zero`` and in a world of one.
    """
    size, rank = here.size, here.rank
    if plan.shard_within == "host":
        size, rank = here.local_size, here.local_rank

    def shape_of(parameter: torch.Tensor) -> torch.Size:
        if not plan.zero or size == 1 or not parameter.dim():
            return parameter.shape
        begin, end = rows_of(parameter.shape[0], size, rank)
        return torch.Size([end - begin, *parameter.shape[1:]])

    return shape_of


def _problem(optimizers: Sequence[Optimizer]) -> str:
    for each in optimizers:
        if type(each) not in KINDS:
            names = ", ".join(kind.__name__ for kind in KINDS)
            return f"an optimizer is a {type(each).__name__}, expected one of torch.optim's {names}"
        if any(group.get("differentiable") for group in each.param_groups):
            return f"{type(each).__name__} with differentiable = True"
        devices = {p.device.type for group in each.param_groups for p in group["params"]}
        if devices - {"cpu"}:
            return f"parameters are on {', '.join(sorted(devices))}, {_EXPECTED_CPU}"
    if not any(_state_bytes(each, lambda parameter: parameter.shape) for each in optimizers):
        return "the optimizers keep no states (SGD does with momentum)"
    return ""


def _states_of(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """Return how many tensors of a parameter's size the optimizer keeps for each of a group."""
    if isinstance(optimizer, Adam):
        return 3 if group["amsgrad"] else 2
    if isinstance(optimizer, RMSprop):
        return 1 + int(group["momentum"] > 0) + int(group["centered"])
    return int(group["momentum"] != 0) if isinstance(optimizer, SGD) else 1


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _region_bytes(optimizer: Optimizer, group: dict[str, Any], shape: torch.Size, dtype: torch.dtype) -> int:
    return _states_of(optimizer, group) * _pages(shape.numel() * dtype.itemsize)


def _state_bytes(optimizer: Optimizer, shape_of: ShapeOf) -> int:
    return sum(
        _region_bytes(optimizer, group, shape_of(parameter), parameter.dtype)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )


class _Region:
    """The part of a file that has the states of one parameter."""

    def __init__(self, file: DiskFile, offset: int, nbytes: int) -> None:
        self._file, self._offset, self._nbytes = file, offset, nbytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._used = 0

    def take(self, state: dict[str, Any], shape: torch.Size) -> int:
        """Let states of this shape, or whose local part has it, lie here; return the bytes of those that came."""
        moved = 0
        for key, value in state.items():
            own = self._tensors.get(key)
            if value is own or key == "step" or not isinstance(value, torch.Tensor):
                continue
            local = _local(value)
            if local.shape != shape or not _is_dense(local):
                continue
            nbytes = _pages(local.nbytes)
            if own is None or not _lies_alike(own, value):
                if self._used + nbytes > self._nbytes:
                    continue  # more than this kind of optimizer keeps: it stays in memory
                flat = self._file.tensor(self._offset + self._used, local.numel(), local.dtype)
                own = self._tensors[key] = _as(value, flat.as_strided(local.shape, local.stride()))
                self._used += nbytes
            with torch.no_grad():
                _local(own).copy_(local)
            state[key] = own
            moved += nbytes
        return moved

    def fetch(self) -> None:
        self._file.fetch(self._offset, self._nbytes)

    def drop(self) -> None:
        self._file.drop(self._offset, self._nbytes)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie side by side, in whatever order."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.layout == torch.strided and tensor.numel() > 0 and last + 1 == tensor.numel()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _lies_alike(own: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether `value` can be copied to where `own` is, and be it from then on."""
    if isinstance(own, DTensor) != isinstance(value, DTensor):
        return False
    if isinstance(own, DTensor) and isinstance(value, DTensor) and own._spec != value._spec:
        return False
    here, there = _local(own), _local(value)
    return here.dtype == there.dtype and here.stride() == there.stride()


def _as(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local`, as a part of a DTensor if `like` is one."""
    if not isinstance(like, DTensor):
        return local
    made: torch.Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


class DiskStates:
    """The states of one optimizer in files."""

    def __init__(self, optimizer: Optimizer, directory: Path, shape_of: ShapeOf) -> None:
        """`shape_of`: is asked for parameters as the groups hold them, now and between steps later."""
        self._directory, self._shape_of = directory, shape_of
        self._regions: dict[torch.Tensor, _Region] = {}
        self._reserved_bytes = _state_bytes(optimizer, shape_of)
        self._file = DiskFile(directory, self._reserved_bytes) if self._reserved_bytes else None

    def attach(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Let the optimizer step by chunks; before hooks that exchange parameters in the groups for shards.

        Without the hooks that are returned states lie in the file as before, and a step takes all of them at once.
        """
        offset = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                nbytes = self._bytes_of(optimizer, group, parameter)
                fits = offset + nbytes <= self._reserved_bytes  # not if a schedule lets more train by now
                if nbytes and parameter.requires_grad and fits and self._file is not None:
                    self._regions[parameter] = _Region(self._file, offset, nbytes)
                    offset += nbytes
        return [
            optimizer.register_load_state_dict_post_hook(self.move_all),
            optimizer.register_step_pre_hook(self._before_step),
        ]

    def move_all(self, optimizer: Optimizer) -> None:
        """Move the states that there are. To be called between steps."""
        for group in optimizer.param_groups:
            for chunk in self._chunks(optimizer, group, group["params"]):
                self._settle(optimizer, group, chunk)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See [Note: a step by chunks]."""
        stand_in = object.__new__(type(optimizer))
        stand_in.__dict__.update(optimizer.__dict__)
        whole = [list(group["params"]) for group in optimizer.param_groups]
        stand_in.param_groups = _ChunkedGroups(self, optimizer, whole)
        return (stand_in, *args[1:]), kwargs

    def chunked(self, optimizer: Optimizer, whole: Sequence[list[torch.Tensor]]) -> Iterator[dict[str, Any]]:
        """Yield the groups in chunks; a chunk's states are on disk again when the next one is asked for.

        `whole`: the parameters of the groups, where these hold rows now. See [Note: states of shards].
        """
        todo = [
            (group, chunk)
            for group, parameters in zip(optimizer.param_groups, whole, strict=True)
            for chunk in self._chunks(optimizer, group, parameters)
        ]
        for number, (group, chunk) in enumerate(todo):
            for _, parameter in todo[number + 1][1] if number + 1 < len(todo) else ():
                if parameter in self._regions:
                    self._regions[parameter].fetch()
            yield {**group, "params": [held for held, _ in chunk]}
            self._settle(optimizer, group, chunk)

    def _chunks(
        self, optimizer: Optimizer, group: dict[str, Any], whole: Sequence[torch.Tensor]
    ) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Yield what the group holds now and the parameters it is of, a chunk at a time."""
        chunk: list[tuple[torch.Tensor, torch.Tensor]] = []
        nbytes = 0
        for held, parameter in zip(group["params"], whole, strict=True):
            size = self._bytes_of(optimizer, group, parameter)
            if chunk and nbytes + size > STATE_CHUNK_BYTES:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append((held, parameter))
            nbytes += size
        yield chunk

    def _settle(
        self, optimizer: Optimizer, group: dict[str, Any], chunk: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        moved = 0
        for held, parameter in chunk:
            state = optimizer.state.get(held)
            if not state:
                continue
            region = self._regions.get(parameter)
            if region is None:  # it came later, or began to train
                nbytes = self._bytes_of(optimizer, group, parameter)
                if not nbytes:
                    continue
                region = self._regions[parameter] = self._late_region(nbytes)
            moved += region.take(state, self._shape_of(parameter))
            region.drop()
        if moved:
            trim_heap()  # see [Note: states come to the file]

    def _bytes_of(self, optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> int:
        return _region_bytes(optimizer, group, self._shape_of(parameter), parameter.dtype)

    def _late_region(self, nbytes: int) -> _Region:
        try:
            return _Region(DiskFile(self._directory, nbytes), 0, nbytes)
        except OSError as problem:
            raise ConfigError(
                f'offload = "disk": no room for {nbytes} bytes of a parameter that began to train after '
                f"fd.distribute: {self._directory}: {problem.strerror}"
            ) from None


class _ChunkedGroups(list[dict[str, Any]]):
    """The groups of a stand-in: chunks, each time they are gone over."""

    def __init__(self, states: DiskStates, optimizer: Optimizer, whole: Sequence[list[torch.Tensor]]) -> None:
        super().__init__(optimizer.param_groups)
        self._states, self._of, self._whole = states, optimizer, whole

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._states.chunked(self._of, self._whole)
