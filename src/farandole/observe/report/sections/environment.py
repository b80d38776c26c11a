"""The plan as it was applied, and where the run ran."""

from __future__ import annotations

import json
import shlex
from typing import Any

from ..content import Block, Fold, Pairs, Run, Section, Text

MOST_ROWS = 80
MOST_CHARACTERS = 2000


def make(run: Run) -> Section:
    """Return the plan and the environment."""
    blocks: list[Block] = []
    plan = run.facts.get("plan")
    if isinstance(plan, dict) and plan:
        blocks.append(
            Fold("Plan", [Pairs([(str(key), _text(value)) for key, value in list(plan.items())[:MOST_ROWS]])])
        )
    else:
        blocks.append(Text("The plan is unknown.", quiet=True))
    blocks.append(Pairs(_environment(run)))
    return Section("environment", "Plan and environment", blocks)


def _environment(run: Run) -> list[tuple[str, str]]:
    facts = run.facts
    rows = []
    if facts:
        command = facts.get("command")
        words = [str(word) for word in command] if isinstance(command, list) else []
        rows += [
            ("command", shlex.join(words) if words else "unknown"),
            ("started", str(facts.get("started", "unknown"))),
            ("hosts", _hosts(_hosts_of(run))),
            ("cores", str(facts.get("cores", "unknown"))),
            ("congestion control", str(facts.get("congestion_control") or "unknown")),
            ("commit", str(facts.get("commit") or "none")),
        ]
        versions = facts.get("versions")
        if isinstance(versions, dict):
            rows += [(str(name), _text(value)) for name, value in list(versions.items())[:MOST_ROWS]]
    elif run.timelines:
        hosts = sorted({str(timeline.started.host) for timeline in run.timelines})
        rows += [("started", str(run.timelines[0].started.wall_time)), ("hosts", _hosts(hosts))]
    return [(name, text[:MOST_CHARACTERS]) for name, text in rows]


def _hosts_of(run: Run) -> Any:
    """Return those that ranks ran on; an inner launcher of several knows its own host only."""
    told = run.facts.get("hosts")
    seen = list(dict.fromkeys(str(timeline.started.host) for timeline in run.timelines))
    return told if isinstance(told, list) and len(told) >= len(seen) else seen


def _hosts(hosts: Any) -> str:
    names = [str(host) for host in hosts] if isinstance(hosts, list) else []
    more = f" and {len(names) - 16} more" if len(names) > 16 else ""
    return ", ".join(names[:16]) + more if names else "unknown"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:MOST_CHARACTERS]
