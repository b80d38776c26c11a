"""The library with `FarandoleExchange` and `FarandoleClock`: compiled when a graph first needs it, kept, loaded.

See `comm.native.build` for where it is kept. Without a compiler, or with FARANDOLE_NATIVE=0, there is none, and
graphs call a Python function instead.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ....comm.native.build import Recipe, Unusable, load
from ....core.environ.env import native_loops_are_wanted
from ....core.host.installed import CPP
from ..installed import tf

_FRAMEWORK = "libtensorflow_framework.so.2"
_HANDLE, _NUMBERS = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)


class Library(NamedTuple):
    """The operation, and the functions by which it is served; `exchange.cc` says what each does."""

    operation: Any
    clock: Any
    next: Any
    post: Any
    look: Any
    tensor: Any
    output: Any
    finish: Any
    fail: Any
    clocks: Any


@cache
def find_library() -> Library | None:
    """Return the library; None, with a warning, where there can be none. The first call may take seconds."""
    if not native_loops_are_wanted():
        return None
    folder = Path(tf.__file__).parent
    if not (folder / _FRAMEWORK).exists():
        _warn(f"{folder} has no {_FRAMEWORK}")
        return None
    recipe = Recipe(
        Path(__file__).with_name("exchange.cc"),
        compilers=CPP,
        flags=("-std=c++17", "-O2", "-fvisibility=hidden", "-fPIC", "-shared"),
        libraries=(f"-L{folder}", f"-l:{_FRAMEWORK}"),
        made_for=(tf.__version__,),
    )
    try:
        return load(recipe, _load)
    except (Unusable, AttributeError, tf.errors.OpError) as problem:
        _warn(str(problem))
        return None


def _warn(why: str) -> None:
    warnings.warn(
        f"farandole: operations inside graphs go through tf.numpy_function, one after the other: {why}. "
        "Install a C++ compiler (g++) to have them run beside each other",
        RuntimeWarning,
        stacklevel=2,
    )


def _load(path: str) -> Library:
    made = tf.load_op_library(path)
    library = ctypes.CDLL(path)  # the same one: it is loaded once

    def function(name: str, result: Any, *arguments: Any) -> Any:
        found = library[f"farandole_{name}"]
        found.restype, found.argtypes = result, arguments
        return found

    return Library(
        made.farandole_exchange,
        made.farandole_clock,
        function("next", _HANDLE, _NUMBERS),
        function("post", None, ctypes.c_int64),
        function("look", ctypes.c_int, _HANDLE, _NUMBERS, _NUMBERS, ctypes.POINTER(ctypes.c_char_p)),
        function("tensor", _HANDLE, _HANDLE, ctypes.c_int, _NUMBERS, ctypes.c_int),
        function("output", _HANDLE, _HANDLE, ctypes.c_int, ctypes.c_int, _NUMBERS, ctypes.c_int),
        function("finish", None, _HANDLE),
        function("fail", None, _HANDLE, ctypes.c_int, ctypes.c_char_p),
        function("clocks", ctypes.c_int, _NUMBERS, ctypes.c_int),
    )
