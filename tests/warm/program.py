"""A forked process that becomes a Python program, as if an interpreter had been started for it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import linecache
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NoReturn

_SETTINGS = ("TF_", "KERAS_BACKEND")
"""Of packages that a server has imported, if it was asked to; read then."""
# Read when an interpreter starts or a library is loaded: too late for a process that has done both.
_READ_EARLY = (
    *_SETTINGS,
    "PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_",
    "TORCH_", "PYTORCH_",
)  # fmt: skip
_READ_ANEW = {"PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS"}
"""These `become` reads again."""
_READ_LATE = {"TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"}
"""These TensorFlow reads when it makes its threads, for its first operation: that is after a fork."""
_CUSTOMIZE = ("sitecustomize.py", "usercustomize.py")
_SHIM = Path(__file__).resolve().parents[2] / "src" / "farandole" / "launch" / "job" / "shim"


@dataclass(frozen=True)
class Program:
    """What a command line asks a Python interpreter for."""

    option: str
    """``-c``, ``-m``, or nothing: a file."""
    target: str
    arguments: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Of the interpreter, before the rest."""

    @property
    def is_launcher(self) -> bool:
        """Whether it starts Python programs of its own: with one thread, and keeping nothing for its end."""
        return (self.option, self.target) == ("-m", "farandole")


def read_program(words: Sequence[str], environment: Mapping[str, str], ours: Mapping[str, str]) -> Program | None:
    """Return the program of a Python's command line; None where only a real interpreter would do.

    `ours` is the environment that the process which is to become it was started with.
    """
    options = ("-u",) if words[1:2] == ["-u"] else ()
    rest = list(words[1 + len(options) :])
    if any(environment.get(name) != ours.get(name) for name in {*environment, *ours} if _is_read_early(name)):
        return None
    folders = [Path(folder) for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if environment.get("FARANDOLE_BACKEND") != "farandole":
        folders = [folder for folder in folders if folder != _SHIM]
    if any((folder / name).exists() for folder in folders for name in _CUSTOMIZE):
        return None
    if rest[:1] in (["-c"], ["-m"]) and len(rest) > 1:
        return Program(rest[0], rest[1], tuple(rest[2:]), options)
    if rest and rest[0].endswith(".py"):
        return Program("", rest[0], tuple(rest[1:]), options)
    return None


def read_settings(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that packages read when they are imported."""
    found = [name for name in environment if _is_read_early(name) and name.startswith(_SETTINGS)]
    return tuple((name, environment[name]) for name in sorted(found))


def _is_read_early(name: str) -> bool:
    return name.startswith(_READ_EARLY) and name not in _READ_ANEW | _READ_LATE


class Pristine:
    """What this process was like when it had imported all it was to import.

    `environment`: what it was started with; packages add variables of their own.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        us = __name__.partition(".")[0]
        self._exit_handlers = atexit._ncallbacks()
        self._modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] != us}
        self._filters = list(warnings.filters)
        self._streams = [_Stream.of(stream) for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__)]
        self._finalizers = dict(_finalizers())
        given = {str(Path(folder)) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder}
        self._path = [folder for folder in sys.path[1:] if folder not in given]
        gc.collect()
        gc.freeze()  # what is imported is no garbage, and looking at it takes most of an interpreter's end

    @property
    def is_followed(self) -> bool:
        """Whether something was registered for the end of this process: a child must not do it."""
        return atexit._ncallbacks() != self._exit_handlers

    def become(self, program: Program, environment: Mapping[str, str]) -> NoReturn:
        """Be `program`, to its end. Descriptors, directory and session are as it is to have them."""
        self._forget()
        for name in [name for name in os.environ if name not in environment]:
            del os.environ[name]
        os.environ.update(environment)
        time.tzset()
        self._open_standard_streams(program)
        self._have_imported(program)
        _watch_models()
        _take_threads_and_seeds()
        _end(_play(program))

    def _forget(self) -> None:
        """Undo what this process did since, as far as a program could see it."""
        gc.collect()  # while no descriptor is open that a finalizer could close by its number
        _keep_for_ever([sys.stdin, sys.stdout, sys.stderr, dict(sys.modules)])
        sys.modules.clear()
        sys.modules.update(self._modules)
        finalizers = _finalizers()
        for finalizer in [finalizer for finalizer in finalizers if finalizer not in self._finalizers]:
            _keep_for_ever(finalizers.pop(finalizer))
        if warnings.filters != self._filters:
            warnings.resetwarnings()
            warnings.filters.extend(self._filters)  # type: ignore[attr-defined]
        sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
        threading.excepthook = threading.__excepthook__
        faulthandler.disable()
        tempfile.tempdir = None
        linecache.clearcache()
        _forget_signals()

    def _open_standard_streams(self, program: Program) -> None:
        unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in program.options
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = self._streams[number].open(number, name, unbuffered=unbuffered)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)

    def _have_imported(self, program: Program) -> None:
        """Leave `sys` as an interpreter leaves it before the program's first line."""
        sys.path_importer_cache.clear()
        importlib.invalidate_caches()
        first = str(Path.cwd() if program.option == "-m" else Path(program.target).resolve().parent)
        given = [str(Path(name)) for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
        sys.path[:] = ["" if program.option == "-c" else first, *given, *self._path]
        sys.argv[:] = [program.option or program.target, *program.arguments]
        asked = [*program.options, *filter(None, [program.option]), program.target]
        sys.orig_argv[:] = [sys.executable, *asked, *program.arguments]
        main = types.ModuleType("__main__")
        vars(main).update(__builtins__=sys.modules["builtins"], __loader__=BuiltinImporter, __annotations__={})
        sys.modules["__main__"] = main


@dataclass(frozen=True)
class _Stream:
    encoding: str
    errors: str

    @classmethod
    def of(cls, stream: io.TextIOBase | None) -> _Stream:
        assert isinstance(stream, io.TextIOWrapper), "the server has its three streams"
        assert stream.errors is not None, "it has been opened"
        return cls(stream.encoding, stream.errors)

    def open(self, number: int, name: str, *, unbuffered: bool) -> io.TextIOWrapper | None:
        """Return what Python opens over a descriptor when it starts."""
        try:
            os.fstat(number)
        except OSError:
            return None
        mode = "r" if number == 0 else "w"
        raw = io.FileIO(number, mode, closefd=False)
        raw.name = f"<{name}>"
        binary: Any = raw
        if not unbuffered or number == 0:
            binary = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
        lines = not unbuffered and (number == 2 or raw.isatty())
        stream = io.TextIOWrapper(
            binary, self.encoding, self.errors, newline="\n", line_buffering=lines, write_through=unbuffered
        )
        stream.mode = mode  # type: ignore[misc]
        return stream


def _finalizers() -> dict[Any, Any]:
    return weakref.finalize._registry  # type: ignore[attr-defined,no-any-return]


def _keep_for_ever(thing: object) -> None:
    """Never run what ends `thing`: its descriptors have numbers that are others' now."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _forget_signals() -> None:
    """As after `exec`: what was ignored still is, what had a handler has none; then as Python starts."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)


def _watch_models() -> None:
    """Do what the launcher's `sitecustomize` does when torch is imported."""
    torch = sys.modules.get("torch.nn.parallel.distributed")
    if torch is not None and str(_SHIM) in sys.path:
        spec = spec_from_file_location("sitecustomize", _SHIM / _CUSTOMIZE[0])
        assert spec is not None, "it is there"
        assert spec.loader is not None, "it is a file"
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.watch_models(torch)
        fsdp: Any = sys.modules["torch.distributed.fsdp"]  # the first optimizer has imported it
        module.watch_sharded(sys.modules[f"{fsdp.__name__}._fully_shard._fully_shard"])
        for package in (fsdp, fsdp._fully_shard):
            package.fully_shard = fsdp._fully_shard._fully_shard.fully_shard


def _take_threads_and_seeds() -> None:
    """Have torch compute with as many threads, and numbers be as random, as if it were loaded now."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
        told = os.environ.get("OMP_NUM_THREADS", "")
        count = int(told) if told.isdecimal() else len(os.sched_getaffinity(0))
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)


def _play(program: Program) -> int:
    """Run it in `__main__`; return the exit code."""
    try:
        _execute(program)
    except SystemExit as request:
        return _code_of(request)
    except BaseException:
        kind, error, trace = sys.exc_info()
        assert kind is not None, "it was caught here"
        assert error is not None, "it was caught here"
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = kind, error.with_traceback(trace), trace
        try:
            sys.excepthook(kind, error, trace)
        except SystemExit as request:  # of a hook that has a code of its own
            return _code_of(request)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _code_of(request: SystemExit) -> int:
    if request.code is None or isinstance(request.code, int):
        return 0 if request.code is None else request.code & 0xFF
    with contextlib.suppress(Exception):
        print(request.code, file=sys.stderr)
    return 1


def _execute(program: Program) -> None:
    main = sys.modules["__main__"]
    if program.option == "-m":
        runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]
        return
    if program.option == "-c":
        exec(compile(program.target, "<string>", "exec", dont_inherit=True), vars(main))
        return
    path = str(Path(program.target).absolute())
    vars(main).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))


def _end(code: int) -> NoReturn:
    """End the interpreter as it ends by itself: threads, exit handlers, modules, then the libraries' own."""
    if code == -signal.SIGINT:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()  # as a real one does when it ends; some versions' exit handlers do not
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("nothing comes after the end")
