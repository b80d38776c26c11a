"""Compiles a file in C or C++ at first use, loads the library, and caches it for the next process.

[Note: a cache that can be trusted] The library lies in a directory of this user's alone, under a name that says
what it was made of (source, flags, compiler, machine, libraries) and the SHA-256 of its own bytes. It is written
aside and renamed, so several ranks may make it at once, and one that was cut short or changed is made again.
Others may not be able to replace the directory between the check and the loading: so every directory above it
belongs to this user or to root, and others may not write to it (unless it is sticky, as /tmp is, where they cannot
rename what is not theirs). Where there is no such directory (a read-only home, a cache in a place that others own)
the library is made in a temporary one that goes as soon as it is loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from ...core.env import native_loops_are_wanted, read_cache_directory
from ...core.host.installed import C, find_compiler

FLAGS = (
    "-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", "-fPIC", "-shared",
)  # fmt: skip
COMPILE_SECONDS = 20.0

L = TypeVar("L")


class Unusable(Exception):
    """There is no library; the text says why."""


@dataclass(frozen=True)
class Recipe:
    """What a library is made of."""

    source: Path
    compilers: tuple[str, ...] = C
    """Names of programs; the first one on the PATH is taken."""
    flags: tuple[str, ...] = FLAGS
    libraries: tuple[str, ...] = ()
    """Arguments behind the source: what to link with."""
    made_for: tuple[str, ...] = ()
    """What else the library depends on: another one is made when it changes."""


def load_library(source: Path) -> ctypes.CDLL:
    """Return the library made of `source`, in C; raise `Unusable` when there is none to be had."""
    return load(Recipe(source), ctypes.CDLL)


def load(recipe: Recipe, loader: Callable[[str], L]) -> L:
    """Return what `loader` makes of the library's path; raise `Unusable` when there is none to be had."""
    compiler = find_compiler(recipe.compilers)
    if compiler is None:
        raise Unusable(f"no {', '.join(recipe.compilers)} on the PATH")
    try:
        key = _key(recipe, compiler)
        directory = _own_directory()
        if directory is None:
            with tempfile.TemporaryDirectory(prefix="farandole-") as aside:
                return loader(str(_compile(compiler, recipe, Path(aside))))
        kept = _find(directory, key)
        if kept is None:
            kept = _make(compiler, recipe, directory, key)
        return loader(str(kept))
    except OSError as problem:
        raise Unusable(f"{recipe.source.name}: {problem}") from None


def _key(recipe: Recipe, compiler: str) -> str:
    """Return the name of what this compiler makes of the source on a machine like this one."""
    program = Path(compiler).resolve()
    status = program.stat()
    made_of = [
        hashlib.sha256(recipe.source.read_bytes()).hexdigest(),
        *recipe.flags,
        *recipe.libraries,
        *recipe.made_for,
        f"{program} {status.st_size} {status.st_mtime_ns}",
        f"{platform.system()} {platform.machine()} {platform.libc_ver()}",
    ]
    return hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:32]


def _own_directory() -> Path | None:
    """Return the directory of this user's libraries, made if need be; None where there can be none."""
    cache = read_cache_directory()
    if cache is None:
        return None
    try:
        directory = Path(cache).resolve() / "farandole" / "native"
        for missing in [place for place in (directory, *directory.parents) if not place.exists()][::-1]:
            missing.mkdir(mode=0o700, exist_ok=True)  # each, where `parents=True` would leave it to the umask
        status = directory.lstat()
        if not all(_is_safe(place.lstat()) for place in directory.parents):
            return None
    except OSError:
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return directory if is_own and os.access(directory, os.W_OK | os.X_OK) else None


def _is_safe(status: os.stat_result) -> bool:
    """Return whether only this user and root can replace what lies in there."""
    is_trusted = stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.geteuid())
    return is_trusted and (not status.st_mode & 0o022 or bool(status.st_mode & stat.S_ISVTX))


def _find(directory: Path, key: str) -> Path | None:
    """Return the kept library; remove what is not what its name says."""
    for path in sorted(directory.glob(f"{key}-*.so")):
        with suppress(OSError):  # another rank may remove it first
            status = path.lstat()
            is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if is_own and path.name == f"{key}-{_digest(path)}.so":
                return path
            path.unlink()
    return None


def _make(compiler: str, recipe: Recipe, directory: Path, key: str) -> Path:
    with tempfile.TemporaryDirectory(prefix="making-", dir=directory) as aside:
        made = _compile(compiler, recipe, Path(aside))
        kept = directory / f"{key}-{_digest(made)}.so"
        made.replace(kept)
    return kept


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(compiler: str, recipe: Recipe, directory: Path) -> Path:
    made = directory / "made.so"
    command = [compiler, *recipe.flags, "-o", str(made), str(recipe.source), *recipe.libraries]
    # A group of its own, so that what the compiler has started ends with it.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=COMPILE_SECONDS)
        except BaseException as problem:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(problem, subprocess.TimeoutExpired):
                raise Unusable(f"{compiler} did not end in {COMPILE_SECONDS:g} s") from None
            raise
    if process.returncode or not made.exists():
        text = said.decode(errors="replace").strip().splitlines()
        raise Unusable(f"{compiler} ended with {process.returncode}: {text[-1] if text else 'nothing said'}")
    return made


# The library of native loops: loaded, with the types of their arguments. `kernels.c` says what each computes.
#
# Loops get an address and a count, and would write beyond the end of anything else: who calls one looks before at
# what it is given. A tensor is contiguous, in CPU memory, and float32 unless said otherwise. A call releases the
# interpreter's lock.


Format = Literal["int8", "int4", "bf16", "fp16"]
FORMATS: tuple[Format, ...] = ("int8", "int4", "bf16", "fp16")
LARGEST_BLOCK = 1024
"""Elements; TILE in `kernels.c`."""

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_log = logging.getLogger("farandole")


class Loops(NamedTuple):
    """The functions of one format; `kernels.c` says what their arguments are."""

    encode: Callable[..., None]
    add_up: Callable[..., None]
    land: Callable[..., int]


class Kernels:
    """The library's functions, with the types of their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raise `AttributeError` when a function is missing."""

        def function(name: str, *arguments: type[ctypes.c_void_p | ctypes.c_int64]) -> Any:
            found = library[f"farandole_{name}"]
            found.argtypes, found.restype = arguments, _COUNT if name.startswith("land_") else None
            return found

        each = (_POINTER, _POINTER, _POINTER, _COUNT, _COUNT)
        pieces = (_POINTER, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _POINTER, _COUNT, _COUNT)
        self.of_format: dict[Format, Loops] = {
            name: Loops(
                function(f"encode_{name}", *each),
                function(f"add_up_{name}", *pieces),
                function(f"land_{name}", *each),
            )
            for name in FORMATS
        }
        self._sum_rows = function("sum_rows", _POINTER, _COUNT, _COUNT, _COUNT)

    def row_sum(self, parts: Sequence[torch.Tensor]) -> Callable[[int], None]:
        """Return what adds `parts`, two or more, in their order and writes the sum into the first n of them."""
        if len(parts) < 2:
            raise ValueError(f"the sum of {len(parts)} rows: expected two or more")
        _require_floats(parts)
        pointers = (_POINTER * len(parts))(*(part.data_ptr() for part in parts))
        rows, elements, kept = len(parts), parts[0].numel(), list(parts)

        def add_up(targets: int) -> None:
            if not 0 <= targets <= len(kept):  # which also keeps the memory alive that the pointers are of
                raise ValueError(f"the sum of {len(kept)} rows into {targets} of them")
            self._sum_rows(pointers, rows, targets, elements)

        return add_up


def _require_floats(tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ValueError` for tensors that are not contiguous float32 in CPU memory, or of unequal length."""
    count = tensors[0].numel()
    for tensor in tensors:
        if not (
            tensor.is_cpu
            and tensor.dtype == torch.float32
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
            and tensor.numel() == count
        ):
            strides = f" and strides {tensor.stride()}" if tensor.layout == torch.strided else ""
            raise ValueError(
                f"native loops: {tensor.dtype} of shape {tuple(tensor.shape)}{strides} on {tensor.device.type}, "
                f"expected {count} contiguous float32 numbers on cpu"
            )


def loops() -> Kernels | None:
    """Return the loops; None where FARANDOLE_NATIVE is 0 or none can be made. The first call may take seconds."""
    return _load() if native_loops_are_wanted() else None


@cache
def _load() -> Kernels | None:
    try:
        return Kernels(load_library(Path(__file__).with_name("kernels.c")))
    except (Unusable, AttributeError) as problem:
        _log.debug("no native loops: %s", problem)
        return None
