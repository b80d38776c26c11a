"""The tables of docs/reference/api.md: public names, signatures and the first words of docstrings."""

from __future__ import annotations

import inspect
import re

import farandole as fd
from tests.style.marked import Marked

TABLES = Marked("reference/api.md", "names")
GROUPS = {
    "The three lines": {
        "init": "../run/launch.md",
        "distribute": "plan.md",
        "shard": "#epochs-and-resuming #batches-of-about-equal-length #the-same-data-on-all-ranks",
    },
    "Ranks": {
        "World": "",
        "world": "",
        "shutdown": "",
        "print": "",
        "barrier": "",
        "main_first": "#one-rank-first",
        "seed": "#random-numbers",
        "preempted": "../run/launch.md#a-warning-before-the-end",
        "mean": "#metrics-over-all-ranks",
        "gather": "#metrics-over-all-ranks #losses-over-the-joined-batch",
        "notebook": "../start.md#notebooks",
    },
    "In the loop": {
        "prefetch": "#batches-ahead-of-the-step",
        "accumulate": "#accumulating-in-the-loop",
        "weight": "#losses-over-tokens",
        "step": "../fit/one-model.md#pipeline-parallel ../fit/one-model.md#targets-that-do-not-count",
        "evaluate": "../fit/one-model.md#pipeline-parallel #metrics-over-all-ranks",
        "drain": "../fit/one-model.md#without-a-flush ../fast/rarely-meeting.md#local-steps",
        "averaged": "../fast/rarely-meeting.md#local-steps",
    },
    "Parts of models": {
        "context_shard": "../fit/one-model.md#context-parallel",
        "context_positions": "../fit/one-model.md#context-parallel",
        "context_gather": "../fit/one-model.md#context-parallel",
        "MixtureOfExperts": "../fit/one-model.md#experts",
        "router_loss": "../fit/one-model.md#the-layer",
        "RowTable": "../fast/rarely-meeting.md#rows-by-id",
        "RowCopy": "../fast/rarely-meeting.md#a-copy-that-serves",
        "chunked_cross_entropy": "../fit/memory.md#cross-entropy-in-chunks",
        "freeze": "../fit/memory.md#frozen-weights-in-few-bits",
        "low_rank_adapters": "../fit/memory.md#adapters",
        "OneBitAdam": "../fast/slow-networks.md#1-bit-adam",
    },
    "Save and load": {
        "save": "checkpoints.md",
        "load": "checkpoints.md",
        "Checkpointer": "checkpoints.md#while-training-goes-on",
        "exchange_state": "../fast/slow-networks.md#saving-and-loading",
        "load_exchange_state": "../fast/slow-networks.md#saving-and-loading",
    },
    "Records, checks, plans": {
        "log": "#trackers",
        "phase": "",
        "record": "../check/slow.md#training-with-ddp-fsdp2-or-horovods-api",
        "verify": "../check/right.md",
        "noise_scale": "../plan/planner.md#the-gradient-noise-scale",
        "NoiseScale": "../plan/planner.md#the-gradient-noise-scale",
        "find_micro_batch": "../fit/memory.md#the-largest-micro-batch",
        "find_plan": "../plan/planner.md",
        "Plan": "plan.md",
    },
    "Errors": dict.fromkeys(
        (
            "FarandoleError", "ConfigError", "PlanError", "CheckpointError", "LaunchError", "CommError",
            "PeerLost", "Mismatch", "Stalled", "VerificationFailed",
        ),
        "",
    ),
}  # fmt: skip
"""Names by heading, in the order of the page, each with links to sections, by spaces."""
_READ_ONLY = (fd.Plan, fd.World, fd.NoiseScale)


def tables() -> list[str]:
    """Return the tables as lines of Markdown."""
    lines = []
    for heading, names in GROUPS.items():
        lines += [f"### {heading}", "", "| name | what it is |", "|---|---|"]
        lines += [f"| `fd.{signature(name)}` | {summary(name)}{_links(more)} |" for name, more in names.items()]
        lines.append("")
    return lines[:-1]


def signature(name: str) -> str:
    """Return ``name(parameter, *, other=1)``; of classes that nobody makes, the name."""
    value = getattr(fd, name)
    if inspect.isclass(value) and (issubclass(value, BaseException) or value in _READ_ONLY):
        return name
    plain = inspect.signature(value)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in plain.parameters.values()]
    text = str(plain.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return name + re.sub(r"'([^']*)'", r'"\1"', text)


def summary(name: str) -> str:
    """Return the first paragraph of the docstring in a line, and who has to call it; of a world its fields."""
    value = getattr(fd, name)
    first, _, rest = (inspect.getdoc(value) or "").partition("\n\n")
    called = re.match(r"Call it on all ranks[^.]*\.", rest)
    if called:
        first += f" {called[0]}"
    elif value is fd.World:
        first += f" It has {rest.partition(chr(10) * 2)[0]}"
    return " ".join(first.split()).replace("|", "\\|")


def _links(targets: str) -> str:
    links = ", ".join(f"[{'more' if at else 'More'}]({target})" for at, target in enumerate(targets.split()))
    return f" {links}." if links else ""
