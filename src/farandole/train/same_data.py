"""Whether the ranks of `fd.shard` have the same data: equal lengths do not say it.

[Note: data that are the same] Compared are the indices of each `Subset` in a dataset, and its first, middle and
last sample: texts by what follows their last slash, as a path may differ; numbers with a fraction by a weighted
sum, within 1/1000 of their norm, as another CPU rounds otherwise. A sample is taken twice, with other seeds: what
differs then is random, and where it is on one rank no rank is compared. Before an error samples are taken more
often: a coin of another generator may fall alike twice.

[Note: samples are taken in a child] To read one may open files that workers must not share when they are forked,
begin threads, draw random numbers or count calls. So a forked child reads, and all that ends with it. It is waited
for a second for each take of the three; what was not read by then, or cannot be, is not compared. It is not ended
in the middle of a sample, which it may be writing to a cache: it ends after that one. Files that are open share
their position with the parent, and connections their bytes: before it reads, the child opens the files anew and
closes all else. A dataset with a connection is not compared then.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import math
import multiprocessing
import os
import random
import signal
import stat
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset

from ..comm.batch_weight import tensors_in
from ..comm.messages import bytes_of
from ..comm.world.session import NEVER
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from ..core.vocabulary.degrees import ORDER, OTHER_SAMPLES
from ..core.vocabulary.errors import Mismatch
from ..core.vocabulary.text import name_ranks, write_notice
from ..parallel.instrument.phase_hooks import observe_passes

# Says when ranks train on the same samples, which is never meant: a loader that was not divided.
#
# Looks at the first training pass of a run and no other: the first that a gradient comes back to. Each rank
# leaves a hash of its inputs in the store then, and after the first step, when all ranks have been through an
# exchange, rank 0 compares what is there.

_MOST_TENSORS, _MOST_ELEMENTS = 8, 65536
WITHOUT_A_LOADER = (
    "without a loader, draw other samples on each rank: farandole.seed(1, per_rank=True) instead of "
    "torch.manual_seed, or the rank in the seed of the generator that draws them"
)
"""What a script does that draws its batches itself: from an array, or from an environment that it acts in."""


class BatchDigests:
    """The hashes of the ranks' first batches, in the store."""

    def __init__(self, here: World, topic: str, remedy: str) -> None:
        self._world, self._remedy = here, remedy
        prefix = here.topic(topic)
        self._keys = [f"{prefix}/{rank}" for rank in range(here.size)]

    def leave(self, digest: str) -> None:
        """Leave this rank's."""
        if self._world.store is not None:
            with suppress(RuntimeError):  # a store that fails is found by who needs it
                self._world.store.set(self._keys[self._world.rank], digest)

    def compare(self) -> None:
        """On rank 0: warn of ranks with the same one. Ranks that left none are not waited for.

        Ranks that divide a model are to have the same samples: the first of them is compared.
        """
        if self._world.rank:
            return
        groups = sorted(_same_ranks(self._read()), key=len)
        if groups:
            ranks = name_ranks(groups[-1])
            write_notice(
                f"warning: {ranks} trained on the same first batch, so they do the same "
                f"work and not more of it; divide the samples: {self._remedy}"
            )

    def _read(self) -> list[str]:
        store = self._world.store
        digests = [""] * len(self._keys)
        with suppress(RuntimeError):
            together = [name for name in ORDER if name not in OTHER_SAMPLES]
            for rank in self._world.degrees.first_ranks(together):
                key = self._keys[rank]
                if store is not None and store.check([key]):  # without waiting for a rank that has not trained
                    digests[rank] = store.get(key).decode()
        return digests


class FirstBatch:
    """Watches a world of several ranks until its first step is done."""

    def __init__(self, here: World) -> None:
        self._digests = BatchDigests(here, "first batch", f"loader = farandole.shard(loader); {WITHOUT_A_LOADER}")
        self._digest = ""
        """The hash of the inputs of the pass that is going on."""
        self._has_set = False
        self._remove: Any = observe_passes(here, self)
        here.session.steps.after_step(self._after_step)
        here.session.call_on_close(self.close)

    def close(self) -> None:
        """Look no more."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def forward_begins(self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Look at what a model is given."""
        wanted = model.training and not self._has_set
        self._digest = _hash((arguments, named)) if wanted else ""

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """Leave the hash when a gradient comes back: a pass without one is no training."""
        if not self._digest:
            return
        leave = partial(self._leave, self._digest)
        self._digest = ""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(leave)

    def _leave(self, digest: str, _: torch.Tensor) -> None:
        if self._has_set or self._remove is None:
            return
        self._has_set = True
        self._digests.leave(digest)

    def _after_step(self, _: int) -> int:
        if self._remove is not None:
            self.close()
            self._digests.compare()
        return NEVER


def _same_ranks(digests: list[str]) -> list[list[int]]:
    """Return the groups of ranks with equal digests."""
    distinct = (digest for digest in dict.fromkeys(digests) if digest)
    groups = ([rank for rank, other in enumerate(digests) if other == digest] for digest in distinct)
    return [ranks for ranks in groups if len(ranks) > 1]


def _hash(inputs: Any) -> str:
    digest = hashlib.sha256()
    count = 0
    for tensor in islice(tensors_in(inputs), _MOST_TENSORS):
        with suppress(
            RuntimeError, NotImplementedError, TypeError
        ):  # sparse or quantised ones, or of another library
            flat = tensor.detach().reshape(-1)[:_MOST_ELEMENTS].cpu()
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(bytes_of(flat).numpy().data)
            count += flat.numel()
    return digest.hexdigest() if count > 1 else ""


_TAKES, _TAKES_BEFORE_AN_ERROR = 2, 10
_MOST_SECONDS = 60
_MOST_NUMBERS = 2**18
"""An array with more is compared by each n-th."""
_MOST_DATASETS = 1000
"""Within each other, that are looked through."""
_REMEDY = (
    "give the same data on all ranks: draw the split with a generator of its own "
    "(generator=torch.Generator().manual_seed(0)), before fd.seed(per_rank=True)"
)


def data_of(dataset: Any, takes: int = _TAKES) -> list[Any]:
    """Return what is compared of this rank's data, as JSON values: of indices, then of samples. None: nothing."""
    places = _places(dataset)
    told = _told_by_child(dataset, places, takes) if places else []
    return [_indices_of(dataset), *told, *[None] * (len(places) - len(told))]


def refuse_other_data(here: World, dataset: Any, said: Sequence[list[Any]]) -> None:
    """Raise `Mismatch` where `said`, what `data_of` gave on each rank, differs; on every rank."""
    differing = _differing(said)
    if differing and 0 not in differing:
        differing = _differing(
            all_gather_json(here, "samples that differ", data_of(dataset, _TAKES_BEFORE_AN_ERROR))
        )
    for at, ranks in differing.items():
        what = f"sample {_places(dataset)[at - 1]}" if at else "the split by indices"
        raise Mismatch(
            f"{what} in the {type(dataset).__name__} on {name_ranks([here.job_ranks[rank] for rank in ranks])} is "
            f"not that of rank {here.job_ranks[0]}",
            rank=here.job_rank,
            operation="comparing the data given to fd.shard",
            remedy=_REMEDY,
        )


def _differing(said: Sequence[list[Any]]) -> dict[int, list[int]]:
    """Return, by place in what was said, the ranks that do not say what rank 0 does."""
    rows = {at: row for at, row in enumerate(zip(*said, strict=True)) if None not in row}
    found = {at: [rank for rank, each in enumerate(row) if not _alike(each, row[0])] for at, row in rows.items()}
    return {at: ranks for at, ranks in found.items() if ranks}


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, str):
        return one == str(other)
    (text, total, norm), (other_text, other_total, other_norm) = one, other
    return bool(text == other_text and abs(total - other_total) <= 1e-5 + 1e-3 * max(norm, other_norm))


def _places(dataset: Any) -> list[int]:
    total = 0
    with suppress(TypeError, NotImplementedError):  # as torch's samplers, it may need no length
        total = 0 if isinstance(dataset, IterableDataset) else len(dataset)
    return sorted({0, total // 2, total - 1}) if total else []


def _indices_of(dataset: Any) -> str | None:
    digest = hashlib.blake2b(digest_size=8)
    try:
        for indices in _splits(dataset, set()):
            array = np.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)
            digest.update(f"{array.shape}".encode() + array.astype(np.int64).tobytes())
    except (TypeError, ValueError, RuntimeError, OverflowError):  # keys that are no numbers
        return None
    return digest.hexdigest()


def _splits(dataset: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the indices of all subsets, in a wrapper of the user's too."""
    if id(dataset) in seen or len(seen) >= _MOST_DATASETS:
        return
    seen.add(id(dataset))
    if isinstance(dataset, Subset):
        yield dataset.indices
    for value in getattr(dataset, "__dict__", {}).values():
        has_members = isinstance(value, (list, tuple)) and value and isinstance(value[0], Dataset)
        for each in value if has_members else [value]:
            if isinstance(each, Dataset):
                yield from _splits(each, seen)


def _told_by_child(dataset: Any, places: list[int], takes: int) -> list[Any]:
    """Return what is compared of the samples that were read in time. See [Note: samples are taken in a child]."""
    told: list[Any] = []
    answers, writing = multiprocessing.Pipe(duplex=False)
    with answers, writing, suppress(OSError, EOFError):  # no memory for another process; the child's end
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads that go on: the child needs none of them
            deadline = time.monotonic() + takes
            child = os.fork()
        if child == 0:
            _read(dataset, places, takes, writing, deadline)
        threading.Thread(target=_reap, args=(child,), daemon=True).start()
        writing.close()
        while len(told) < len(places) and answers.poll(max(0.0, deadline - time.monotonic())):
            told.append(json.loads(answers.recv_bytes()))
    return told


def _reap(child: int) -> None:
    with suppress(ChildProcessError):  # the script waits for all its children, or ignores them
        os.waitpid(child, 0)


def _leave_parents_files(answers: Connection) -> None:
    """Share no position of a file and no connection with the parent. See [Note: samples are taken in a child]."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if number in (nothing, answers.fileno()):
            continue
        try:
            is_file = stat.S_ISREG(os.fstat(number).st_mode)
        except OSError:  # that of the listing
            continue
        own = nothing
        with suppress(OSError):  # a file that may not be opened any more
            if is_file:
                own = os.open(f"/proc/self/fd/{number}", fcntl.fcntl(number, fcntl.F_GETFL))
                os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, number)


def _read(dataset: Any, places: list[int], takes: int, answers: Connection, deadline: float) -> NoReturn:
    """In a child: tell what is compared of each sample, and end."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_MOST_SECONDS)  # a lock may be held for ever here
        gc.disable()  # what the parent has left is not to be closed here
        torch.set_num_threads(1)
        _leave_parents_files(answers)
        with Path(os.devnull).open("w") as silence, redirect_stdout(silence), redirect_stderr(silence):
            for place in places:
                told = None
                with suppress(Exception):  # the user meets it where the sample is really read
                    first, *others = [_take(dataset, place, seed, deadline) for seed in range(takes)]
                    told = first if all(each == first for each in others) else None
                answers.send_bytes(json.dumps(told).encode())
    finally:
        os._exit(0)


def _take(dataset: Any, place: int, seed: int, deadline: float) -> list[Any]:
    if time.monotonic() > deadline:
        os._exit(0)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    sketch = _Sketch()
    sketch.add(dataset[place])
    return [sketch.digest.hexdigest(), sketch.total, math.sqrt(sketch.square)]


class _Sketch:
    """A sample in three values. See [Note: data that are the same]."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=8)
        self.total = self.square = 0.0
        self._count = 0

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.double() if value.is_floating_point() else value).numpy()
        if isinstance(value, (float, complex)) or hasattr(value, "__array_interface__"):
            self._add_array(np.asarray(value))
        elif isinstance(value, (list, tuple, Mapping)):
            self.digest.update(f"{type(value).__name__} {len(value)}".encode())
            for each in (
                sorted(value.items(), key=lambda item: repr(item[0])) if isinstance(value, Mapping) else value
            ):
                self.add(each)
        elif isinstance(value, str):
            self.digest.update(value.rpartition("/")[2].encode(errors="replace") + b"\0")
        elif isinstance(value, (bytes, bytearray)):
            self.digest.update(value)
        else:
            self.digest.update(
                (repr(value) if isinstance(value, (int, type(None))) else type(value).__name__).encode()
            )

    def _add_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.kind not in "biufc":
            self.add(array.tolist())
            return
        self.digest.update(f"{array.dtype.kind} {array.shape}".encode())
        flat = array.reshape(-1)[:: 1 + array.size // _MOST_NUMBERS]
        if array.dtype.kind in "biu":
            self.digest.update(flat.tobytes())
            return
        numbers = np.stack([flat.real, flat.imag]).astype(np.float64).reshape(-1)
        numbers = np.where(np.abs(numbers) < 1e100, numbers, 0.0)
        self.total += float((numbers * np.cos(np.arange(self._count, self._count + numbers.size))).sum())
        self.square += float((numbers**2).sum())
        self._count += numbers.size
