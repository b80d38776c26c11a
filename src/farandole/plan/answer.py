"""An answer as text, and its files: the plan, and beside it everything that led to it."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.cluster import Cluster
from ..core.cluster_file import read_cluster, write_cluster
from ..core.vocabulary.config import FieldPath, from_plain, read_mapping, to_plain
from ..core.vocabulary.degrees import Degrees, degrees_of
from ..core.vocabulary.errors import ConfigError, PlanError
from ..core.vocabulary.rules import MOST_ZERO
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.text import format_table, upgrade_remedy
from ..core.vocabulary.units import format_bytes, format_rate, format_seconds, format_share
from .candidate import Candidate
from .cost.held import memory_of_candidate
from .division import nearest_degree, of_experts, of_sequences, of_shards, of_stages, of_tensor
from .memory import PRECISIONS, STAGES, MemoryByCategory, Setting
from .memory_page import MOST_RANKS, Choice
from .profile import ModelProfile, read_profile, write_profile
from .search.reasons import CATEGORIES, WORDS, in_words
from .search.result import FEWER_RANKS, PlanAnswer, PlanFamily, PredictedPlan, WhatIf
from .search.space import SearchLayout

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
    return {"kind": KIND, "version": VERSION, **to_plain(answer, {Plan: _plan_to_plain})}


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
    remedy = "farandole plan ... --out writes it beside the plan"
    value = read_mapping(path, error=PlanError, remedy=remedy, is_json=True)
    if value.get("kind") != KIND:
        raise PlanError(f'{path} holds no reasons of a plan: its kind is not "{KIND}"')
    version = value.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise PlanError(f"{path}: version {version!r}, expected at most {VERSION}", remedy=upgrade_remedy())
    body = {key: each for key, each in value.items() if key not in ("kind", "version")}
    where = FieldPath(path.name, error=PlanError, needs_all=True)
    return from_plain(PlanAnswer, body, where, {Plan: lambda table, path: Plan.from_mapping(table, where=path)})


def _plan_to_plain(plan: Plan) -> dict[str, Any]:
    """Return the keys that are not as by default."""
    default = Plan()
    keys = [key for key, each in plan.to_mapping().items() if each != getattr(default, key)]
    return {"version": plan.version} | {key: to_plain(getattr(plan, key)) for key in keys}


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


# The answer of the planner as text for a terminal of 100 columns.


# The memory of ``farandole estimate`` where degrees divide the model: the planner's, of one setting at a time.


@dataclass(frozen=True)
class DividedModel:
    """A model, the degrees that divide it, and a batch: the example batch of the profile on each rank."""

    profile: ModelProfile
    sizes: Mapping[str, int]
    """Ranks of each degree above 1 but `data`, which is what they leave."""
    ranks_per_host: int

    def memory(self, setting: Setting) -> MemoryByCategory:
        """Return the memory of the rank of a pipeline that needs most."""
        found = memory_of_candidate(self.profile, self._candidate(setting), self.ranks_per_host)
        return max(found, key=lambda each: each.total_bytes)

    def refuse(self, rank_counts: Sequence[int]) -> None:
        """Raise `ConfigError`, with the nearest degree that can be, for a model or ranks that do not divide so."""
        profile, tensor = self.profile, self.sizes.get("tensor", 1)
        rules: dict[str, Callable[[int], str]] = {
            "tensor": lambda degree: of_tensor(profile, degree),
            "pipeline": lambda degree: of_stages(profile, degree),
            "expert": lambda degree: of_experts(profile, degree),
            "context": lambda degree: of_sequences(profile, degree, tensor, Plan.context_kind),
        }
        for name, degree in self.sizes.items():
            if reason := rules[name](degree):
                near = nearest_degree(rules[name], degree, MOST_RANKS)
                said = reason.removeprefix(f"{name} = {degree} ")
                raise ConfigError(
                    f"--{name} {degree}{': ' if said == reason else ' '}{said}",
                    remedy=f"use --{name} {near}" if near > 1 else f"leave --{name} out",
                )
        if profile.samples % self._passes:
            raise ConfigError(
                f"--pipeline {self.sizes['pipeline']}: a batch of {profile.samples} samples does not divide into "
                f"{self._passes} micro-batches",
                remedy=f"give a batch of {self._passes} samples, or of another multiple of {self._passes}",
            )
        for ranks in rank_counts:
            self._degrees(ranks)

    def possible(self, choice: Choice, ranks: int) -> tuple[Choice, list[str]]:
        """Return the settings of `choice` that can be with these degrees, and notes about those that cannot.

        Raises `PlanError` for one that cannot be where not all were asked for.
        """
        notes: list[str] = []

        def kept(
            what: str, values: Sequence[str], known: Sequence[str], setting_of: Callable[[str], Setting]
        ) -> list[str]:
            found = []
            for each in values:
                try:
                    self._candidate(setting_of(each))
                except PlanError as problem:
                    if list(values) != list(known):
                        raise
                    notes.append(f"{what} {each} is left out: {problem.message.removeprefix('plan: ')}")
                else:
                    found.append(each)
            return found

        stages = kept("stage", choice.stages, STAGES, lambda stage: Setting(stage, "fp32", "none", ranks))
        precisions = kept(
            "precision", choice.precisions, PRECISIONS, lambda name: Setting("0", name, "none", ranks)
        )
        return replace(choice, stages=stages, precisions=precisions), notes

    @property
    def _passes(self) -> int:
        """Micro-batches of a step: as many as a plan has by default."""
        pipeline = self.sizes.get("pipeline", 1)
        return 2 * pipeline if pipeline > 1 else 1

    def _degrees(self, ranks: int) -> Degrees:
        return degrees_of(Plan(**dict[str, Any](self.sizes)), ranks)

    def _candidate(self, setting: Setting) -> Candidate:
        degrees = self._degrees(setting.ranks)
        zero = MOST_ZERO if setting.stage == "hybrid" else int(setting.stage)
        if reason := of_shards(self.profile, zero, degrees.pipeline):
            raise PlanError(f"plan: zero = {zero}: {reason}", remedy="use stage 0")
        layout = SearchLayout(
            pipeline=degrees.pipeline,
            data=degrees.data,
            expert=degrees.expert,
            context=degrees.context,
            tensor=degrees.tensor,
            zero=zero,
            micro_batch=self.profile.samples // self._passes,
            passes=self._passes,
            recompute=setting.recompute,
            precision=setting.precision,
        )
        return layout.to_candidate({"shard_within": "host"} if setting.stage == "hybrid" else {})


WIDTH = 100
_SHOWN = 6
"""Rejected kinds beside those of one degree or stage."""
_MOST_STAGES = 12
"""Rows of the table of memory."""


def to_text(answer: PlanAnswer, *, file: str = "plan.why.json") -> str:
    """Return the answer; `file` is where everything is."""
    request = answer.request
    head = (
        f"{answer.model} on {answer.cluster}: {request.ranks} rank{'s' * (request.ranks > 1)}, global batch "
        f"{request.global_batch}, goal {request.goal}"
    )
    parts = [wrapped(head)]
    if answer.best is None:
        parts.append("\n".join(wrapped(each) for each in answer.advice))
    else:
        parts += [*_best(answer, answer.best), _why(answer)]
    parts.append(_rejected(answer, file))
    if answer.trials:
        parts.append(_trials(answer))
    if answer.changes:
        parts.append("What would change\n" + "\n".join(_listed(change_text(each)) for each in answer.changes))
    if answer.needs:
        parts.append("The script\n" + "\n".join(map(_listed, answer.needs)))
    if answer.warnings:
        parts.append("Warnings\n" + "\n".join(map(_listed, answer.warnings)))
    return "\n\n".join(part for part in parts if part) + "\n"


def wrapped(text: str, indent: str = "", after: str | None = None) -> str:
    """Return `text` in lines of at most 100 columns."""
    hanging = indent if after is None else after
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False)


def interval_text(option: PredictedPlan) -> str:
    """Return the seconds of a step with their interval."""
    prediction = option.prediction
    low, high = format_seconds(prediction.low_seconds), format_seconds(prediction.high_seconds)
    return f"{format_seconds(prediction.seconds)} ({low} to {high})"


def change_text(change: WhatIf) -> str:
    """Return what a change would bring."""
    if change.option is None:
        return f"{change.what}: no plan that is known fits"
    gain = f"{format_share(abs(change.gain))} {'more' if change.gain >= 0 else 'fewer'} samples per second"
    if abs(change.gain) < 5e-4:
        gain = "no more samples per second"
    plan = f", with {in_words(change.option.candidate)}" if change.is_other_plan else ", with the same plan"
    return f"{change.what}: {gain}{plan}"


def memory_rows(answer: PlanAnswer) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the memory by stage and category; equal neighbours are one row."""
    assert answer.best is not None, "only an answer with a plan has memory"
    memory = answer.best.prediction.memory
    head = ["stage" if len(memory) > 1 else "rank", *CATEGORIES, "total", "of the limit"]
    rows: list[list[str]] = []
    first = 0
    for number, each in enumerate(memory):
        if number + 1 < len(memory) and memory[number + 1] == each:
            continue
        values = [getattr(each, f"{name}_bytes") for name in CATEGORIES]
        name = "each" if len(memory) == 1 else str(first) if first == number else f"{first}-{number}"
        cells = ["?" if value is None else format_bytes(value) for value in values]
        share = format_share(each.total_bytes / answer.limit_bytes)
        rows.append([name, *cells, format_bytes(each.total_bytes), share])
        first = number + 1
    return head, rows


def term_rows(option: PredictedPlan) -> list[tuple[str, float]]:
    """Return the parts of a step in words with their seconds, from the largest on; none that is 0."""
    terms = sorted(option.prediction.terms.items(), key=lambda each: -each[1])
    return [(WORDS[name], seconds) for name, seconds in terms if seconds > 0]


def _best(answer: PlanAnswer, best: PredictedPlan) -> list[str]:
    ranks = best.candidate.ranks
    fewer = f", on {ranks} of {answer.request.ranks} ranks" if answer.request.goal in FEWER_RANKS else ""
    lines = [
        wrapped(f"Plan: {in_words(best.candidate)}{fewer}", after="      "),
        f"Step: {interval_text(best)}; {format_rate(best.samples_per_second)} samples per second",
    ]
    head, rows = memory_rows(answer)
    cut = rows[:_MOST_STAGES]
    more = f"\n  and {len(rows) - len(cut)} more rows" if len(rows) > len(cut) else ""
    limit = format_bytes(answer.limit_bytes)
    terms = term_rows(best)
    seconds = best.prediction.seconds
    parts = [[name, format_seconds(value), format_share(value / seconds)] for name, value in terms]
    sent = format_bytes(best.prediction.sent_bytes)
    return [
        "\n".join(lines),
        f"Memory of a rank, which may use {limit}\n{format_table(head, cut, '  ')}{more}",
        f"What a step consists of; a rank sends {sent}\n{format_table(['part', 'time', 'share'], parts, '  ')}",
    ]


def _why(answer: PlanAnswer) -> str:
    return "Why\n" + "\n".join(
        [_listed(f"what binds: {answer.constraint}"), _listed(f"then: {answer.next_bottleneck}")]
    )


def _rejected(answer: PlanAnswer, file: str) -> str:
    others = [each for each in answer.families if each.status != "chosen"]
    if not others:
        return ""
    simple = [each for each in others if " x " not in each.name]
    near = [each for each in others if " x " in each.name][:_SHOWN]
    shown = sorted([*simple, *near], key=others.index)
    lines = [_family(each) for each in shown]
    if len(others) > len(shown):
        lines.append(_listed(f"{len(others) - len(shown)} more kinds are in {file}"))
    return "Rejected, with the best plan of each kind\n" + "\n".join(lines)


def _family(family: PlanFamily) -> str:
    said = {"slower": "", "does not fit": "does not fit: ", "impossible": "not possible: "}[family.status]
    return _listed(f"{family.name}: {said}{family.reason}")


def _trials(answer: PlanAnswer) -> str:
    lines = []
    for each in answer.trials:
        measured = "failed" if each.seconds is None else f"{format_seconds(each.seconds)} measured"
        lines.append(
            _listed(f"{each.plan}: {measured}, {format_seconds(each.predicted_seconds)} predicted; {each.outcome}")
        )
    return "Trials\n" + "\n".join(lines)


def _listed(text: str) -> str:
    return wrapped(text, "  ", "    ")
