"""Small helpers that programs import from `horovod.common.util`.

There are no compiled extensions here: an extension is available when its framework and our front end are
installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ...core.environ.env import changed_environment
from .exceptions import HorovodVersionMismatchError, get_version_mismatch_message

EXTENSIONS = ["tensorflow", "torch", "mxnet"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _cache(function: Callable[P, R]) -> Callable[P, R]:
    """Remember the result of `function` for each set of arguments."""
    results: dict[Any, R] = {}

    @functools.wraps(function)
    def remembered(*args: P.args, **kwargs: P.kwargs) -> R:
        key = (args, frozenset(kwargs.items()))
        if key not in results:
            results[key] = function(*args, **kwargs)
        return results[key]

    return remembered


def get_ext_suffix() -> str:
    """Return the ending of a compiled extension's file name for this Python."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return where a compiled extension would lie: beside the module `pkg_path`, below `args`."""
    return str(Path(pkg_path).parent.joinpath(*args[:-1], args[-1] + get_ext_suffix()))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError if the framework of an extension is not installed.

    Args:
        ext_name: ``horovod.<framework>``.
        ext_env_var: ignored; Horovod has this argument.
        pkg_path: ignored, as before.
        args: ignored, as before.
    """
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(f"Extension {ext_name} is not available: {framework} is not installed, or not supported")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework ("torch", "tensorflow") is installed and has a front end here."""
    if ext_base_name not in EXTENSIONS:
        return False
    front_end = Path(__file__).resolve().parents[1] / ext_base_name / "__init__.py"
    return front_end.exists() and importlib.util.find_spec(ext_base_name) is not None


@_cache
def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework sees a GPU."""
    if ext_base_name == "torch" and extension_available("torch"):
        import torch

        return bool(torch.cuda.is_available())
    if ext_base_name == "tensorflow" and extension_available("tensorflow"):
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
    return False


@_cache
def mpi_built(verbose: bool = False) -> bool:
    """Return False: MPI may start the ranks, and moves no bytes."""
    return False


@_cache
def gloo_built(verbose: bool = False) -> bool:
    """Return whether ranks can talk over sockets."""
    return bool(_basics().gloo_built())


@_cache
def nccl_built(verbose: bool = False) -> bool:
    """Return whether ranks can talk over NCCL."""
    return bool(_basics().nccl_built())


@_cache
def ddl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


@_cache
def ccl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables inside a ``with`` and put back what was there; None leaves one alone."""
    with changed_environment(kwargs):
        yield


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return the function that makes one reduction of `op` and the older `average`."""

    def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
        if op is not None:
            if average is not None:
                raise ValueError("The op parameter supersedes average. Please provide only one of them.")
            return op
        if average is None:
            return int(reduce_ops.Average)
        warnings.warn(
            "Parameter `average` has been replaced with `op`: give op=Average or op=Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        return int(reduce_ops.Average if average else reduce_ops.Sum)

    return handle_average_backwards_compatibility


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether `num_rank` is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 - the name of Horovod's parameter
    """Return `l` in `n` runs whose lengths differ by one at most; the longer ones come first."""
    short, longer = divmod(len(l), n)
    ends = [i * short + min(i, longer) for i in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Warn when `name` is not installed in `version`; with an `exception`, raise an error caused by it."""
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if version == installed or _is_same_release(version, installed):
        return
    if exception is None:
        warnings.warn(get_version_mismatch_message(name, version, installed), stacklevel=2)
    else:
        raise HorovodVersionMismatchError(name, version, installed) from exception


def _is_same_release(version: str, installed: str) -> bool:
    """Return whether one of them says only less: torch calls itself 2.14.1+cu130 where its package is 2.14.1."""
    public, _, build = version.partition("+")
    installed_public, _, installed_build = installed.partition("+")
    return public == installed_public and not (build and installed_build)


def is_iterable(x: object) -> bool:
    """Return whether `x` can be iterated over."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


@_cache
def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether version `ver` is at least `target`; both begin with three numbers."""
    return _three_numbers(ver) >= _three_numbers(target)


def _three_numbers(version: str) -> tuple[int, ...]:
    words = version.partition("+")[0].split(".")[:3]
    numbers = ["".join(_leading_digits(word)) for word in words]
    well_formed = len(numbers) == 3 and all(numbers)
    assert well_formed, f"version {version!r}: expected the form x.y.z"
    return tuple(int(number) for number in numbers)


def _leading_digits(word: str) -> list[str]:
    digits = []
    for letter in word:
        if not letter.isdigit():
            break
        digits.append(letter)
    return digits


def _basics() -> Any:
    from .basics import basics

    return basics
