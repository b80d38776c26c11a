"""Small helpers that programs import from `horovod.common.util`.

There are no compiled extensions here: an extension is available when its framework and our front end are
installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ...core.env import changed_environment
from .exceptions import HorovodVersionMismatchError, get_version_mismatch_message

EXTENSIONS = ["tensorflow", "torch", "mxnet"]

T = TypeVar("T")


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


@functools.cache
def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework sees a GPU."""
    if ext_base_name == "torch" and extension_available("torch"):
        from ...comm.device.accelerator import gpu_count

        return gpu_count() > 0
    if ext_base_name == "tensorflow" and extension_available("tensorflow"):
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
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
