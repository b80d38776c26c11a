"""Docstrings of public names say what a signature does not: parameters, results and errors."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import farandole as fd
import farandole.horovod.torch as hvd

OWN = ("farandole",)
"""Packages whose docstrings are ours to write: names that are passed on from torch are not."""


def public(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions and classes of a module, with ``module.name``."""
    for name in module.__all__:
        value = getattr(module, name)
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "").split(".")[0] in OWN:
            yield f"{module.__name__}.{name}", value


PUBLIC = dict([*public(fd), *public(hvd)])
FUNCTIONS = {name: value for name, value in PUBLIC.items() if not inspect.isclass(value)}


def documentation(name: str, seen: frozenset[str] = frozenset()) -> str:
    """Return the docstring of a public name, with those that it refers to by "See `name`."""
    module, _, _ = name.rpartition(".")
    text = inspect.getdoc(PUBLIC[name]) or ""
    for other in re.findall(r"See `(\w+)`", text):
        full = f"{module}.{other}"
        if full in PUBLIC and full not in seen:
            text += "\n" + documentation(full, seen | {name})
    return text


def parameters(value: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that a caller gives; none for a class that is only read or caught."""
    if inspect.isclass(value) and (issubclass(value, BaseException) or value in (fd.Plan, fd.World)):
        return []
    try:
        return [name for name in inspect.signature(value).parameters if not name.startswith("_")]
    except ValueError:
        return []


def is_documented(parameter: str, text: str) -> bool:
    """Return whether a text has the parameter in ``Args`` or names it in prose, a plural for the singular too."""
    names = {parameter, parameter.removesuffix("s")}
    return any(re.search(rf"^\s*{name}: \S|`{name}`|``{name}=", text, re.M) for name in names)


def raised(value: Callable[..., Any]) -> set[str]:
    """Return the names of the errors that a function's own body raises."""
    body = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value))))
    calls = [node.exc for node in ast.walk(body) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    names = {ast.unparse(call.func) for call in calls}
    return {name for name in names if name.endswith("Error") or name in ("Mismatch", "PeerLost", "Stalled")}


def test_the_rules_see_what_they_must() -> None:
    assert is_documented("tensors", "Args:\n    tensor: shape (rows, ...).")
    assert is_documented("op", "`op` is Average.")
    assert not is_documented("op", "The operation.")
    assert raised(fd.exchange_state) <= {"ConfigError"}


def test_parameters_of_public_names_are_documented() -> None:
    assert [name for name in PUBLIC if not documentation(name)] == []
    missing = [
        f"{name}: its docstring does not speak of {each}"
        for name, value in PUBLIC.items()
        for each in parameters(value)
        if not is_documented(each, documentation(name))
    ]
    assert missing == []


def test_results_of_public_functions_are_documented() -> None:
    missing = []
    for name, value in FUNCTIONS.items():
        returns, text = str(inspect.signature(value).return_annotation), documentation(name)
        none = returns == "None" or returns.startswith(("Iterator", "Generator")) or text.startswith("Raise ")
        if not none and not re.search(r"\b[Rr]eturns?\b", text):
            missing.append(f"{name} returns {returns}, which is not documented")
    assert missing == []


def test_errors_of_public_functions_are_documented() -> None:
    missing = [
        f"{name} raises {error}, which its docstring does not name"
        for name, value in FUNCTIONS.items()
        for error in raised(value)
        if error not in documentation(name)
    ]
    assert missing == []


def test_fields_of_a_plan_are_documented() -> None:
    source = inspect.getsource(fd.Plan)
    fields = fd.Plan.__dataclass_fields__
    assert [name for name in fields if not re.search(rf'^    {name}: .*\n    """', source, re.M)] == []
