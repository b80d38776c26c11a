"""The files of an answer: the plan, and beside it everything that led to it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.cluster import Cluster
from ...core.cluster_file import read_cluster, write_cluster
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import did_you_mean, upgrade_remedy
from ..profile import ModelProfile
from ..profile_file import read_profile, write_profile
from ..search.reasons import in_words
from ..search.result import PlanAnswer

# What a plan was made from, beside its file: the cluster and the model's profile, for `farandole simulate`.


KIND = "farandole plan answer"
VERSION = 1


def why_path(plan_path: Path) -> Path:
    """Return where the reasons of a plan file are: ``plan.why.json`` beside ``plan.toml``."""
    return plan_path.with_name(f"{plan_path.stem}.why.json")


def write_answer(answer: PlanAnswer, plan_path: Path) -> None:
    """Write the plan and its reasons; without a plan the reasons alone.

    Raises:
        ConfigError: a file cannot be written.
    """
    try:
        if answer.best is not None:
            plan_path.write_text(plan_text(answer), encoding="utf-8")
        why_path(plan_path).write_text(to_json(answer) + "\n", encoding="utf-8")
    except OSError as problem:
        raise ConfigError(
            f"cannot write {problem.filename}: {problem.strerror or problem}",
            remedy="choose another file with --out",
        ) from None


def plan_text(answer: PlanAnswer) -> str:
    """Return the plan file: all keys, for the ranks that it is for."""
    assert answer.best is not None, "there is a plan"
    candidate = answer.best.candidate
    return (
        f"# {in_words(candidate)}\n"
        f"# for {candidate.ranks} ranks and a global batch of {candidate.global_batch}; "
        f"farandole explain says why\n{answer.plan.to_toml()}"
    )


def to_json(answer: PlanAnswer) -> str:
    """Return everything, versioned; `read_why` reads it."""
    return json.dumps(to_mapping(answer))


def to_mapping(answer: PlanAnswer) -> dict[str, Any]:
    """Return everything as plain values."""
    return {"kind": KIND, "version": VERSION, **to_plain(answer)}


def read_answer(plan_path: Path) -> PlanAnswer:
    """Return the answer that wrote a plan file.

    Raises:
        PlanError: a file cannot be read, or has the reasons of another plan: each key that differs is named.
    """
    if plan_path.name.endswith(".why.json"):
        raise PlanError(f"{plan_path} holds the reasons of a plan", remedy="name the plan file beside it")
    plan = Plan.read(plan_path)
    path = why_path(plan_path)
    answer = read_why(path)
    if answer.best is None:
        raise PlanError(f"{path} found no plan that fits, and {plan_path} is one", remedy="plan again")
    differences = answer.plan.differences(plan)
    if differences:
        shown = ", ".join(f"{key} = {there!r} ({here!r} there)" for key, (here, there) in differences.items())
        raise PlanError(
            f"{plan_path} is not the plan that {path.name} explains: {shown}",
            remedy="undo these changes, or plan again with --fix for each of them",
        )
    return answer


def read_why(path: Path) -> PlanAnswer:
    """Read the reasons of a plan; raise `PlanError` with the path of what is wrong in them."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise PlanError(
            f"cannot read {path}: {reason}", remedy="farandole plan ... --out writes it beside the plan"
        ) from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise PlanError(f"{path} is not JSON: {problem}") from None
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise PlanError(f'{path} holds no reasons of a plan: its kind is not "{KIND}"')
    version = value.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise PlanError(
            f"{path}: version {version!r}, expected at most {VERSION}",
            remedy=upgrade_remedy(),
        )
    body = {key: each for key, each in value.items() if key not in ("kind", "version")}
    answer: PlanAnswer = from_plain(PlanAnswer, body, path.name)
    return answer


# Frozen dataclasses to plain values and back, strictly: a wrong value is an error with the path to it.


def to_plain(value: Any) -> Any:
    """Return dicts, lists, texts and numbers; of a plan the keys that are not as by default."""
    if isinstance(value, Plan):
        default = Plan()
        keys = [key for key, each in value.to_mapping().items() if each != getattr(default, key)]
        return {"version": value.version} | {key: to_plain(getattr(value, key)) for key in keys}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(each) for each in value]
    return value


def from_plain(kind: Any, value: Any, path: str) -> Any:
    """Return `value` as `kind`; raise `PlanError` with the path of what is missing, unknown or of another type."""
    if kind is Plan:
        return Plan.from_mapping(_table(value, path), where=path)
    if dataclasses.is_dataclass(kind):
        return _record(kind, _table(value, path), path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return from_plain(next(each for each in arguments if each is not type(None)), value, path)
    if origin is typing.Literal:
        if value not in arguments:
            raise PlanError(f"{path} = {value!r}, expected one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        return _tuple(arguments, value, path)
    if origin is not None and issubclass(origin, Mapping):
        table = _table(value, path)
        return {
            from_plain(arguments[0], key, f"{path}: a key"): from_plain(arguments[1], each, f"{path}.{key}")
            for key, each in table.items()
        }
    return _scalar(kind, value, path)


def _record(kind: Any, table: Mapping[str, Any], path: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]
    for key in table:
        if key not in names:
            raise PlanError(f"{path}: unknown key {key!r}", remedy=did_you_mean(key, names))
    missing = [name for name in names if name not in table]
    if missing:
        raise PlanError(f"{path}: {missing[0]} is missing")
    return kind(**{name: from_plain(hints[name], table[name], f"{path}.{name}") for name in names})


def _tuple(arguments: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise PlanError(f"{path} = {_short(value)}, expected a list")
    if arguments[-1] is Ellipsis:
        return tuple(from_plain(arguments[0], each, f"{path}.{i}") for i, each in enumerate(value))
    if len(value) != len(arguments):
        raise PlanError(f"{path} has {len(value)} values, expected {len(arguments)}")
    pairs = zip(arguments, value, strict=True)
    return tuple(from_plain(kind, each, f"{path}.{i}") for i, (kind, each) in enumerate(pairs))


def _table(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{path} = {_short(value)}, expected a table")
    return value


def _scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is Any:
        return tuple(value) if isinstance(value, list) else value
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if kind is not float and type(value) is kind:
        return value
    wanted = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}[kind]
    raise PlanError(f"{path} = {_short(value)}, expected {wanted}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# What a plan was made from, beside its file: the cluster and the model's profile, for `farandole simulate`.


def cluster_path(plan_path: Path) -> Path:
    """Return where the cluster of a plan file is: ``plan.cluster.toml`` beside ``plan.toml``."""
    return plan_path.with_name(f"{plan_path.stem}.cluster.toml")


def profile_path(plan_path: Path) -> Path:
    """Return where the profile of a plan file's model is: ``plan.profile.json`` beside ``plan.toml``."""
    return plan_path.with_name(f"{plan_path.stem}.profile.json")


def write_inputs(profile: ModelProfile, cluster: Cluster, plan_path: Path) -> None:
    """Write both beside a plan file. A cluster that no file can hold is left out.

    Raises:
        ConfigError: the profile cannot be written.
    """
    write_profile(profile, profile_path(plan_path))
    with contextlib.suppress(ConfigError):  # made by hand, with figures that a file may not have
        write_cluster(cluster, cluster_path(plan_path))


def read_inputs(plan_path: Path) -> tuple[ModelProfile, Cluster]:
    """Return what a plan was made from. Raises `ConfigError` if a file is missing or cannot be used."""
    for path in (profile_path(plan_path), cluster_path(plan_path)):
        if not path.is_file():
            raise ConfigError(
                f"{plan_path}: there is no {path.name} beside it",
                remedy="make the plan with: farandole plan --out",
            )
    return read_profile(profile_path(plan_path)), read_cluster(cluster_path(plan_path))
