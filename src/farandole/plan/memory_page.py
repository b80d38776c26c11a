"""The answer of ``farandole estimate``: as JSON, and as a page for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from ..core.vocabulary.text import format_table
from ..core.vocabulary.units import format_bytes
from .memory import PRECISIONS, RECOMPUTE, STAGES, MemoryByCategory, ModelFacts, Setting, memory_of

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "temporary")
OFFLOAD = "offload"
_KEYS_OF: dict[str, dict[str, str]] = {
    "0": {}, "1": {"zero": "1"}, "2": {"zero": "2"}, "3": {"zero": "3"},
    "hybrid": {"zero": "3", "shard_within": "host"},
    "fp32": {}, "bf16": {"precision": "bf16"}, "bf16-weights": {"precision": "bf16", "bf16_parameters": "true"},
    "none": {}, "blocks": {"recompute": "blocks"}, OFFLOAD: {"offload": "disk"},
    "int8": {"frozen_codec": "int8"}, "int4": {"frozen_codec": "int4"},
}  # fmt: skip
"""The keys of a plan that make a stage, a precision, recomputation, and a model lighter without other code."""
_SCALES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class ProcessMemory(NamedTuple):
    """What a process has before its model; nothing where that is not known, or not counted (a GPU's)."""

    resident_bytes: int = 0
    data_bytes: int = 0
    """The same as RLIMIT_DATA counts it."""


UNKNOWN_PROCESS = ProcessMemory()


@dataclass(frozen=True)
class EstimateRequest:
    """What is asked for on the command line."""

    model: str
    batch: str | None
    inputs: Sequence[str]
    loss: str | None
    optimizer: str
    device: str
    choice: Choice
    np: int
    """Ranks of the table by category."""
    ranks: Sequence[int]
    """Ranks of the table of totals."""
    limit_bytes: int | None
    """Memory of a rank; None: unlimited."""
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Degrees above 1 that divide the model, by name."""


@dataclass(frozen=True)
class MicroBatchRequest:
    """What ``--find`` is asked for: functions by name, as in `EstimateRequest`."""

    model: str
    batch: str | None
    inputs: tuple[str, ...]
    loss: str | None
    optimizer: str
    device: str
    precision: str
    recompute: str
    global_batch: int
    ranks: int
    limit_bytes: int | None


@dataclass(frozen=True)
class Estimate:
    """What is known about a training, and what was asked."""

    request: EstimateRequest
    facts: ModelFacts
    parameters: int
    """Elements of all parameters."""
    blocks: int
    notes: list[str]
    memory: Callable[[Setting], MemoryByCategory]
    """The memory of a rank for its model."""
    process: ProcessMemory = UNKNOWN_PROCESS
    lighter: Mapping[str, Callable[[Setting], MemoryByCategory]] = field(default_factory=dict)
    """The same for what makes it lighter, by name: with states on a disk, frozen with adapters, in few bits."""

    def lighter_rows(self) -> dict[str, list[MemoryRow]]:
        """Return the rows of `np` ranks at `Choice.lighter_ends`, by what makes the model lighter."""
        choice, np = self.request.choice, self.request.np
        settings = [Setting(stage, *end, np) for end in choice.lighter_ends() for stage in choice.stages]
        return {
            name: [
                MemoryRow(each, memory(each), self.process.resident_bytes, self.whole_bytes) for each in settings
            ]
            for name, memory in self.lighter.items()
        }

    def rows(self, ranks: Sequence[int]) -> list[MemoryRow]:
        """Return all chosen settings on each of these numbers of ranks."""
        return rows_of(self.memory, self.request.choice, ranks, self.process.resident_bytes, self.whole_bytes)

    @property
    def whole_bytes(self) -> int:
        """What a process has when its whole model is made, before it is divided or stored; 0: not counted."""
        weights = self.facts.weights.get("fp32")
        if weights is None or not self.process.resident_bytes:
            return 0
        return self.process.resident_bytes + weights.weight_bytes + weights.buffer_bytes

    def to_mapping(self) -> dict[str, Any]:
        """Return everything, in bytes, by name."""
        request = self.request
        ranks = sorted({request.np, *request.ranks})
        result: dict[str, Any] = {
            "model": request.model,
            "parameters": self.parameters,
            "blocks": self.blocks,
            "optimizer": request.optimizer,
            "device": request.device,
            "ranks_per_host": request.choice.ranks_per_host,
            "degrees": dict(request.degrees),
            "process": self.process._asdict(),
            "rows": [row.to_mapping() for row in self.rows(ranks)],
            "lighter": {name: [row.to_mapping() for row in rows] for name, rows in self.lighter_rows().items()},
            "notes": self.notes,
        }
        if request.limit_bytes is not None:
            for row, each in zip(self.rows(ranks), result["rows"], strict=True):
                each["fits"] = row.fits(request.limit_bytes)
            result["memory_bytes"] = request.limit_bytes
            result["advice"] = self.advice()
            result["command"] = self.command()
        return result

    def advice(self) -> list[str]:
        """Return what to know about the limit on `np` ranks: nothing if a setting fits."""
        request = self.request
        limit_bytes = request.limit_bytes
        rows = self.rows([request.np])
        if limit_bytes is None or any(row.fits(limit_bytes) for row in rows):
            return []
        if limit_bytes < self.whole_bytes:
            return [
                f"does not fit into {format_bytes(limit_bytes)}: each rank makes the whole model first, and has "
                f"{format_bytes(self.whole_bytes)} then; fd.freeze stores layers in few bits as they are made"
            ]
        smallest = smallest_of(rows)
        stage, precision, recompute, ranks = smallest.setting
        needed_bytes, process_bytes = smallest.total_bytes, smallest.process_bytes
        too_much = format_bytes(needed_bytes - limit_bytes)
        lines = [
            f"does not fit into {format_bytes(limit_bytes)} on {ranks} rank{'s' * (ranks > 1)}: the least is "
            f"{format_bytes(needed_bytes)}, {too_much} too much, at ZeRO stage {stage}, "
            f"precision {precision}, recompute {recompute}"
        ]
        if request.degrees:
            return [*lines, self._more_ranks(limit_bytes)]
        found = remedies(self.facts, smallest.setting, limit_bytes - process_bytes, request.choice)
        lines += [
            f"it would fit with {remedy.text}: {format_bytes(process_bytes + remedy.total_bytes)}"
            for remedy in found
        ]
        best = {name: smallest_of(each) for name, each in self.lighter_rows().items() if each}
        fitting = {name: row for name, row in best.items() if row.fits(limit_bytes)}
        lines += [
            f"it would fit with {name}, at ZeRO stage {row.setting.stage}, precision {row.setting.precision}, "
            f"recompute {row.setting.recompute}: {format_bytes(row.total_bytes)}"
            for name, row in fitting.items()
        ]
        if not found and not fitting:
            least = least_possible(self.facts, smallest.setting, request.choice)
            lines.append(
                f"nothing makes it fit: {format_bytes(process_bytes + least.total_bytes)} with {least.text}"
            )
        return lines

    def command(self) -> str:
        """Return the command that trains by the first row that fits into the limit; "" without one."""
        request, limit_bytes = self.request, self.request.limit_bytes
        rows = self.rows([request.np]) if limit_bytes is not None else []
        ways = {"": rows, **(self.lighter_rows() if limit_bytes is not None else {})}
        fitting = (
            (row.setting, _KEYS_OF.get(name, {})) for name, each in ways.items() if not name or name in _KEYS_OF
            for row in each if row.fits(limit_bytes or 0)
        )  # fmt: skip
        best, more = next(fitting, (None, {}))
        if best is None:
            return ""
        keys = {**request.degrees, **_KEYS_OF[best.stage], **_KEYS_OF[best.precision], **_KEYS_OF[best.recompute]}
        keys |= more
        file = request.model.partition(":")[0]
        script = file if file.endswith(".py") else "SCRIPT.py"
        words = "".join(f"--set {name}={value} " for name, value in keys.items())
        return f"farandole run -np {request.np} {words}-- python {script}"

    def _more_ranks(self, limit_bytes: int) -> str:
        """Return how many ranks would make it fit, with the same degrees."""
        counts = [
            count for count in rank_counts_of(prod(self.request.degrees.values())) if count > self.request.np
        ]
        for best in (smallest_of(self.rows([count])) for count in counts):
            if best.fits(limit_bytes):
                stage, precision, recompute, ranks = best.setting
                return (
                    f"it would fit on {ranks} ranks, at ZeRO stage {stage}, precision {precision}, recompute "
                    f"{recompute}: {format_bytes(best.total_bytes)}"
                )
        return f"no number of ranks up to {MOST_RANKS} makes it fit with these degrees"


def format_page(estimate: Estimate) -> str:
    """Return the page: one table by category, one of totals by ranks, and notes."""
    request = estimate.request
    weights = next(iter(estimate.facts.weights.values()))
    parts = [
        f"{request.model}: {estimate.parameters:,} parameters, {weights.trainable_elements:,} of them trained by "
        f"{request.optimizer}; {estimate.blocks} blocks",
        _by_category(estimate),
    ]
    parts += _by_ranks(estimate) + _lighter(estimate)
    lines = estimate.advice() + [f"note: {note}" for note in estimate.notes]
    every = [*estimate.rows([request.np]), *(row for rows in estimate.lighter_rows().values() for row in rows)]
    if any(row.total_bytes < estimate.whole_bytes for row in every):
        whole = format_bytes(estimate.whole_bytes)
        lines.append(f"note: each rank makes the whole model before it is divided or stored: {whole}")
    if lines:
        parts.append("\n".join(lines))
    if command := estimate.command():
        parts.append(f"The first row that fits:\n\n  {command}")
    return "\n\n".join(parts)


def _by_category(estimate: Estimate) -> str:
    limit_bytes = estimate.request.limit_bytes
    rows = estimate.rows([estimate.request.np])
    unit, scale = _scale(max(row.total_bytes for row in rows))
    lines = []
    for row in rows:
        values = [*(getattr(row.memory, f"{name}_bytes") for name in CATEGORIES), row.total_bytes]
        line = [*row.setting[:3], *("?" if value is None else _three_figures(value / scale) for value in values)]
        if limit_bytes is not None:
            line.append("yes" if row.fits(limit_bytes) else "no")
        lines.append(line)
    head = ["stage", "precision", "recompute", *CATEGORIES, "total"]
    text = format_table([*head, "fits"] if limit_bytes is not None else head, lines)
    ranks = f"{estimate.request.np} rank{'s' * (estimate.request.np > 1)}{_by_degrees(estimate.request)}"
    limit = f"; what fits into {format_bytes(limit_bytes)}" if limit_bytes is not None else ""
    return f"Memory of one rank of {ranks}, in {unit}{limit}:\n{_before_model(estimate.process)}\n{text}"


def _before_model(process: ProcessMemory) -> str:
    if not process.resident_bytes:
        return ""
    return (
        f"total counts the {format_bytes(process.resident_bytes)} of a process before its model (Python, torch, "
        f"Farandole, your\nmodules), as measured in this command; for RLIMIT_DATA they are "
        f"{format_bytes(process.data_bytes)}\n"
    )


def _by_degrees(request: EstimateRequest) -> str:
    """Return how the ranks divide the model, in brackets."""
    if not request.degrees:
        return ""
    data = request.np // prod(request.degrees.values())
    sizes = {**({"data": data} if data > 1 else {}), **request.degrees}
    most = "; the stage that needs most" if "pipeline" in request.degrees else ""
    return f" ({' x '.join(f'{name} {size}' for name, size in sizes.items())}{most})"


def _lighter(estimate: Estimate) -> list[str]:
    """Return a table of totals for each end of the choice, by what makes the model lighter, and what that is."""
    lighter, ends = estimate.lighter_rows(), estimate.request.choice.lighter_ends()
    if not lighter or not ends:
        return []
    plain = [row for row in estimate.rows([estimate.request.np]) if row.setting[1:3] in ends]
    unit, scale = _scale(max(row.total_bytes for row in plain))
    parts = []
    for end in ends:
        columns = [[row for row in each if row.setting[1:3] == end] for each in (plain, *lighter.values())]
        lines = [
            [rows[0].setting.stage, *(_three_figures(row.total_bytes / scale) for row in rows)]
            for rows in zip(*columns, strict=True)
        ]
        text = format_table(["stage", "as above", *lighter], lines)
        parts.append(
            f"Total in {unit} on {estimate.request.np} ranks, precision {end[0]}, recompute {end[1]}, made "
            f"lighter:\n\n{text}"
        )
    said = {
        OFFLOAD: "--set offload=disk: states of the optimizer are in a file",
        "adapters": "all weights are frozen, with fd.low_rank_adapters where linear layers can take them",
        "int8, int4": "--set frozen_codec=int8, or int4",
    }
    names = ", ".join(lighter)
    parts.append("\n".join(f"{name}: {text}" for name, text in said.items() if name.split(", ")[0] in names))
    return parts


def _by_ranks(estimate: Estimate) -> list[str]:
    """Return one table of totals for the first chosen precision and recomputation, and one for the last."""
    choice, ranks = estimate.request.choice, estimate.request.ranks
    parts = []
    for precision, recompute in choice.ends():
        rows = [row for row in estimate.rows(ranks) if row.setting[1:3] == (precision, recompute)]
        unit, scale = _scale(max(row.total_bytes for row in rows))
        by_stage = {
            stage: [_three_figures(row.total_bytes / scale) for row in rows if row.setting.stage == stage]
            for stage in choice.stages
        }
        text = format_table(
            ["stage", *(str(count) for count in ranks)], [[stage, *by_stage[stage]] for stage in by_stage]
        )
        parts.append(
            f"Total in {unit} by number of ranks, precision {precision}, recompute {recompute}:\n\n{text}"
        )
    return parts


def _scale(count: float) -> tuple[str, float]:
    return next(((unit, scale) for unit, scale in _SCALES if count >= 10 * scale), ("B", 1.0))


def _three_figures(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


# What would make a model fit: each change by itself, else all together, with the memory that is needed then.


# The estimate of memory as a table: every stage, precision and recomputation, and what fits into a limit.

DEGREES = ("tensor", "pipeline", "expert", "context")
"""Those that an estimate takes; the other ranks are data parallel."""


@dataclass(frozen=True)
class MemoryRow:
    """One setting and its memory."""

    setting: Setting
    memory: MemoryByCategory
    process_bytes: int = 0
    """What the process has before its model."""
    whole_bytes: int = 0
    """What it has when its whole model is made, before that is divided."""

    @property
    def total_bytes(self) -> int:
        """The peak of the process."""
        return self.process_bytes + self.memory.total_bytes

    def fits(self, limit_bytes: int) -> bool:
        """Whether a rank stays within the limit."""
        return max(self.total_bytes, self.whole_bytes) <= limit_bytes

    def to_mapping(self) -> dict[str, Any]:
        """Return the setting and all bytes by name."""
        own = {"process_bytes": self.process_bytes, "total_bytes": self.total_bytes}
        return {**self.setting._asdict(), **asdict(self.memory), **own}


@dataclass(frozen=True)
class Choice:
    """The settings that are asked about."""

    stages: Sequence[str] = STAGES
    precisions: Sequence[str] = PRECISIONS
    recompute: Sequence[str] = RECOMPUTE
    ranks_per_host: int = 8

    def without(self, failed: Collection[tuple[str, str]]) -> Choice:
        """Return the choice without precisions that failed, and recomputations that fail in one of the others."""
        precisions = [each for each in self.precisions if (each, RECOMPUTE[0]) not in failed]
        recompute = [each for each in self.recompute if all((name, each) not in failed for name in precisions)]
        return replace(self, precisions=precisions, recompute=recompute)

    def ends(self) -> list[tuple[str, str]]:
        """Return the first precision and recomputation, and the last ones."""
        return _ends(self.precisions, self.recompute)

    def lighter_ends(self) -> list[tuple[str, str]]:
        """Return the same of the precisions that go with states on a disk and with weights in few bits."""
        precisions = [each for each in self.precisions if each != "bf16-weights"]
        return _ends(precisions, self.recompute) if precisions else []


def _ends(precisions: Sequence[str], recompute: Sequence[str]) -> list[tuple[str, str]]:
    return list(dict.fromkeys([(precisions[0], recompute[0]), (precisions[-1], recompute[-1])]))


def rows_of(
    memory: Callable[[Setting], MemoryByCategory],
    choice: Choice,
    ranks: Iterable[int],
    process_bytes: int = 0,
    whole_bytes: int = 0,
) -> list[MemoryRow]:
    """Return the memory of all chosen settings on each of these numbers of ranks."""
    return [
        MemoryRow(setting, memory(setting), process_bytes, whole_bytes)
        for count in ranks
        for precision in choice.precisions
        for recompute in choice.recompute
        for stage in choice.stages
        for setting in [Setting(stage, precision, recompute, count)]
    ]


MOST_RANKS = 1024
RANKS = [2**i for i in range(MOST_RANKS.bit_length())]
"""Numbers of ranks that are looked at."""


def rank_counts_of(group: int) -> list[int]:
    """Return the numbers of ranks that are looked at where `group` ranks divide a model."""
    return [group * count for count in RANKS if group * count <= MOST_RANKS]


class WayToFit(NamedTuple):
    """A change that makes the model fit, and the memory of a rank then."""

    text: str
    total_bytes: int


def smallest_of(rows: list[MemoryRow]) -> MemoryRow:
    """Return the row that needs least; of several the one whose stage shrinks most with more ranks."""
    return min(rows, key=lambda row: (row.memory.total_bytes, row.setting.stage != "3", row.setting.stage == "0"))


def remedies(facts: ModelFacts, setting: Setting, limit_bytes: int, choice: Choice) -> list[WayToFit]:
    """Return what makes `setting`, which is over the limit, fit: single changes, or else all of them at once."""
    single = _fitting(facts, _single_changes(facts, setting), limit_bytes, choice)
    single += _fitting(facts, _more_ranks(setting), limit_bytes, choice)[:1]
    single += _smaller_batch(facts, setting, limit_bytes, choice)
    if single:
        return single
    for more_ranks, best in _more_ranks(_most_frugal(facts, setting)):
        text = f"precision {best.precision}, recompute {best.recompute} and {more_ranks}"
        total_bytes = memory_of(facts, best, ranks_per_host=choice.ranks_per_host).total_bytes
        if total_bytes <= limit_bytes:
            return [WayToFit(text, total_bytes)]
        smaller = _smaller_batch(facts, best, limit_bytes, choice)
        if smaller:
            return [WayToFit(f"{text}, and {smaller[0].text}", smaller[0].total_bytes)]
    return []


def least_possible(facts: ModelFacts, setting: Setting, choice: Choice) -> WayToFit:
    """Return the least memory that there is: every change at once, on the most ranks, without a batch."""
    best = _most_frugal(facts, setting)._replace(stage="3", ranks=MOST_RANKS)
    memory = memory_of(facts, best, ranks_per_host=choice.ranks_per_host, batch_factor=0)
    stage = f"ZeRO stage 3 on {MOST_RANKS} ranks"
    text = f"precision {best.precision}, recompute {best.recompute}, {stage}, without a batch"
    return WayToFit(text, memory.total_bytes)


def _single_changes(facts: ModelFacts, setting: Setting) -> Iterator[tuple[str, Setting]]:
    if setting.recompute != "blocks":
        yield "recompute blocks", setting._replace(recompute="blocks")
    for precision in PRECISIONS[PRECISIONS.index(setting.precision) + 1 :]:
        if precision in facts.weights:
            yield f"precision {precision}", setting._replace(precision=precision)
    for stage in STAGES[STAGES.index(setting.stage) + 1 :]:
        if stage != "hybrid" and setting.ranks > 1:
            yield f"ZeRO stage {stage}", setting._replace(stage=stage)


def _more_ranks(setting: Setting) -> list[tuple[str, Setting]]:
    return [
        (f"ZeRO stage 3 on {count} ranks", setting._replace(stage="3", ranks=count))
        for count in RANKS
        if count > setting.ranks
    ]


def _most_frugal(facts: ModelFacts, setting: Setting) -> Setting:
    precision = [precision for precision in PRECISIONS if precision in facts.weights][-1]
    return setting._replace(precision=precision, recompute=RECOMPUTE[-1])


def _fitting(
    facts: ModelFacts, changes: Iterable[tuple[str, Setting]], limit_bytes: int, choice: Choice
) -> list[WayToFit]:
    found = [
        WayToFit(text, memory_of(facts, setting, ranks_per_host=choice.ranks_per_host).total_bytes)
        for text, setting in changes
    ]
    return [remedy for remedy in found if remedy.total_bytes <= limit_bytes]


def _smaller_batch(facts: ModelFacts, setting: Setting, limit_bytes: int, choice: Choice) -> list[WayToFit]:
    """Return the largest batch that fits, in hundredths of the given one."""
    if (setting.precision, setting.recompute) not in facts.activations:
        return []
    for percent in range(99, 0, -1):
        memory = memory_of(facts, setting, ranks_per_host=choice.ranks_per_host, batch_factor=percent / 100)
        if memory.total_bytes <= limit_bytes:
            return [WayToFit(f"a batch of {percent} % of this one", memory.total_bytes)]
    return []
