"""The files of an answer: the plan, and beside it everything that led to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.suggestions import upgrade_remedy
from ..search.in_words import in_words
from ..search.result import PlanAnswer
from .strict import from_plain, to_plain

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
