"""The user's functions that a command line names: found, called, and their errors with file and line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ...core.vocabulary.errors import ConfigError, FarandoleError
from ...core.vocabulary.text import did_you_mean

_OWN = str(Path(__file__).parents[2])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def load_function(text: str, *, what: str) -> Callable[..., Any]:
    """Return the function that `text` names: ``module:function`` or ``path/file.py:function``.

    Modules are also found in the working directory. `what` is how an error names the argument, e.g. ``--loss``.
    Raises `ConfigError` if there is no such function, or its module fails to import.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(
            f"{what} {text!r}: expected a function as module:function or file.py:function",
            remedy="for example train:make_model, with make_model() in train.py",
        )
    with errors_of_user(f"{what} {text!r}: importing {place}"):
        module = _load_file(Path(place), what) if place.endswith(".py") else _load_module(place, what)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [each for each, value in vars(module).items() if callable(value) and each[0] != "_"]
            raise ConfigError(f"{what} {text!r}: {place} has no {part!r}", remedy=did_you_mean(name, known))
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{what} {text!r}: {name} is {type(found).__name__}, expected a function")
    function: Callable[..., Any] = found
    return function


@contextlib.contextmanager
def errors_of_user(doing: str) -> Iterator[None]:
    """Turn what the user's code raises into a `ConfigError` that names its file and line; keep stdout clean."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except FarandoleError:
            raise
        except SystemExit as error:
            raise ConfigError(
                f"{doing} ended the program: SystemExit({error.code!r}){_place(error)}",
                remedy='put what trains behind: if __name__ == "__main__":',
            ) from error
        except Exception as error:
            raise ConfigError(f"{doing} raised {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Return the type of an error, its first line, and the user's file and line."""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = said.strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__
    return f"{text}{_place(error)}"


def module_of(error: BaseException, model: nn.Module) -> str:
    """Return the name and class of the innermost module of `model` in which an error was raised."""
    names = {id(module): name for name, module in model.named_modules() if name}
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [each for each in owners if id(each) in names]
    return f"{names[id(found[-1])]} ({type(found[-1]).__name__})" if found else type(model).__name__


def _place(error: BaseException) -> str:
    """Return `` (file:line)``: the innermost frame that is neither ours nor a library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({_short(error.filename)}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    users = [frame for frame in frames if not _is_library(frame.filename)]
    return f" ({_short(users[-1].filename)}:{users[-1].lineno})" if users else ""


def _is_library(filename: str) -> bool:
    return filename.startswith((_OWN, *_LIBRARIES)) or "site-packages" in filename


def _short(filename: str) -> str:
    return os.path.relpath(filename) if filename.startswith(str(Path.cwd())) else filename


def _load_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"{what}: no file {str(path)!r}", remedy="name a file that is there: train.py:make_model"
        )
    _find_modules_in(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str, what: str) -> ModuleType:
    _find_modules_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # another module, which the user's module imports
        here = [path.stem for path in Path.cwd().glob("*.py")]
        raise ConfigError(
            f"{what}: no module {name!r}, neither installed nor in {Path.cwd()}",
            remedy=did_you_mean(name, here) if here else "run it where the module is, or name the file",
        ) from None


def _find_modules_in(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
