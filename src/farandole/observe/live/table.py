"""A run's state as a table for terminals, by rich."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...core.vocabulary.units import format_bytes, format_seconds
from .state import RankState, RunState

_NARROW = 72
"""Columns; below, host and data are left out."""


def render(state: RunState, width: int) -> RenderableType:
    """Return what is shown on a terminal of so many columns."""
    head = Text(f"{state.name}  ", style="bold")
    head.append(state.status, style="red" if state.is_over and "failed" in state.status else "green")
    if state.size is not None and len(state.ranks) < state.size:
        head.append(f"  {len(state.ranks)} of {state.size} ranks have written")
    parts: list[RenderableType] = [head]
    if state.ranks:
        parts.append(_table(state, width))
    else:
        parts.append(Text("no rank has written yet: a rank first writes after its first steps"))
    if state.metrics:
        parts.append(Text("  ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())))
    parts += [Text(f"! {alarm}", style="bold red") for alarm in state.alarms]
    return Group(*parts)


def _table(state: RunState, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    is_wide = width >= _NARROW
    columns = ["rank", *(["host"] if is_wide else []), "step", "a step", "mostly", "waits"]
    columns += [*(["data"] if is_wide else []), "sends", "memory"]
    for name in columns:
        table.add_column(name, justify="left" if name in ("host", "mostly") else "right", no_wrap=True)
    for rank in state.ranks:
        table.add_row(*_cells(rank, is_wide=is_wide))
    return table


def _cells(rank: RankState, *, is_wide: bool) -> list[Text]:
    step = f"{rank.step}/{rank.total_steps}" if rank.total_steps else str(rank.step)
    memory = rank.device_bytes if rank.device_bytes is not None else rank.resident_bytes
    cells = [str(rank.rank)]
    cells += [rank.host[:16]] if is_wide else []
    cells += [step, "" if rank.step_seconds is None else format_seconds(rank.step_seconds), rank.phase[:12]]
    cells += [_share(rank.wait_share)]
    cells += [_share(rank.data_share)] if is_wide else []
    sent = rank.sent_bytes_per_second
    cells += ["" if sent is None else f"{format_bytes(sent)}/s", "" if memory is None else format_bytes(memory)]
    return [Text(cell) for cell in cells]


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
