"""``farandole bench collectives``: routes beside each other, and beside what the link could do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.text import did_you_mean, format_table
from ..core.vocabulary.units import format_bytes, format_seconds
from .intervals import NotMeasurable, bound_seconds, least_bytes, median_interval, paired_ratio
from .launch_ranks import Hosts, Say, run_on_hosts

if TYPE_CHECKING:
    import torch

    from ..comm.world.world import World

_MOST_BYTES = 2**32


def check_choices(routes: Sequence[str], operations: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise `ConfigError` for what there is not, with the nearest name, and for sizes that make no sense."""
    for option, given, known in (
        ("--routes", routes, list(ROUTES)),
        ("--operations", operations, list(OPERATIONS)),
    ):
        for name in given:
            if name not in known:
                kind = option.strip("-").removesuffix("s")
                raise ConfigError(f"{option} {name!r}: unknown {kind}", remedy=did_you_mean(name, known))
        if not given or len(set(given)) < len(given):
            raise ConfigError(
                f"{option} {','.join(given)!r}: expected names, each once", remedy=f"known: {', '.join(known)}"
            )
    for size in sizes:
        if not 1 <= size <= _MOST_BYTES:
            raise ConfigError(f"--sizes {size}: expected 1 byte to 4 GiB")
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"--sizes {','.join(map(str, sizes))}: expected numbers of bytes, each once")


def bench_collectives(
    hosts: Hosts, *, sizes: Sequence[int], routes: Sequence[str], operations: Sequence[str], rounds: int, say: Say
) -> dict[str, Any]:
    """Measure; return the result as plain values. Times in seconds, bytes of one host's link."""
    words = ["--sizes", ",".join(map(str, sizes)), "--routes", ",".join(routes)]
    words += ["--operations", ",".join(operations), "--rounds", str(rounds)]
    found = run_on_hosts(hosts, "farandole.bench.collectives_worker", words, say=say)
    first = {(case["operation"], case["size_bytes"]): case for case in reversed(found["cases"])}
    rows = [_row(case, first[case["operation"], case["size_bytes"]], hosts) for case in found["cases"]]
    return {
        **hosts.to_mapping(), "congestion_control": found["congestion_control"], "rounds": rounds, "rows": rows,
        "absent": found["absent"],
    }  # fmt: skip


def _row(case: dict[str, Any], first: dict[str, Any], hosts: Hosts) -> dict[str, Any]:
    seconds, interval = median_interval(case["seconds"])
    ratio, ratio_interval = paired_ratio(case["seconds"], first["seconds"])
    formula = least_bytes(case["operation"], case["size_bytes"], hosts.parties)
    rate = None if hosts.loopback else hosts.bits_per_second
    bound = None if rate is None else bound_seconds(formula, rate)
    return {
        "operation": case["operation"],
        "size_bytes": case["size_bytes"],
        "route": case["route"],
        "seconds": seconds,
        "interval": interval,
        "ratio_to_first": ratio,
        "ratio_interval": ratio_interval,
        "bound_seconds": bound,
        "share_of_bound": None if bound is None else bound / seconds,
        "sent_bytes": median_interval(case["sent_bytes"])[0],
        "formula_bytes": formula,
        "samples": case["seconds"],
    }


def format_collectives(result: dict[str, Any]) -> str:
    """Return the result as a table, and what did not run."""
    head = ["operation", "size", "route", "median", "95 % interval", "x first", "of bound", "sent", "formula"]
    rows = []
    for row in result["rows"]:
        low, high = row["interval"]
        share = row["share_of_bound"]
        rows.append(
            [
                row["operation"],
                format_bytes(row["size_bytes"]),
                row["route"],
                format_seconds(row["seconds"]),
                f"{format_seconds(low)} to {format_seconds(high)}",
                f"{row['ratio_to_first']:.3f}",
                "" if share is None else f"{share:.3f}",
                format_bytes(row["sent_bytes"]),
                format_bytes(row["formula_bytes"]),
            ]
        )
    lines = [format_table(head, rows)]
    lines += [f"did not run: {gone['route']} {gone['operation']}: {gone['reason']}" for gone in result["absent"]]
    return "\n".join(lines)


# The routes that it compares, by name: gloo's, and those of this package.
#
# A route that cannot run in this world raises `NotMeasurable` with the reason.


# What a route is, for ``farandole bench collectives``: a way for ranks to reduce and gather a tensor.
#
# A route makes, for the world it is in, one callable for each operation it knows. That callable takes the whole
# tensor, float32 and one-dimensional, its length a multiple of the number of ranks, and returns the tensor with
# the result:
#
# - all_reduce: the sum over the ranks, in place or where the route has it;
# - reduce_scatter: this rank's part of the sum (the input may be overwritten);
# - all_gather: the whole, of which this rank's part was given in its place.


OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
Run = Callable[["torch.Tensor"], "torch.Tensor"]
Make = Callable[["World"], Run]


@dataclass(frozen=True)
class CollectiveRoute:
    """A way to exchange. None: it has no such operation."""

    what: str
    all_reduce: Make
    reduce_scatter: Make | None = None
    all_gather: Make | None = None

    def make(self, operation: str, world: World) -> Run:
        """Return the callable of `operation`; raise `NotMeasurable` when there is none here."""
        make: Make | None = getattr(self, operation)
        if make is None:
            raise NotMeasurable(f"has no {operation}")
        return make(world)


def _gloo_all_reduce(world: World) -> Run:
    import torch.distributed as dist

    def run(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=world.group)
        return tensor

    return run


def _gloo_reduce_scatter(world: World) -> Run:
    import torch.distributed as dist

    part = _parts(world)
    # Torch is about to give its own a new name.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def run(tensor: torch.Tensor) -> torch.Tensor:
        out = part(tensor)
        scatter(out, tensor, group=world.group)
        return out

    return run


def _gloo_all_gather(world: World) -> Run:
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def run(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor.view(world.size, -1)[world.rank]
        gather(tensor, mine, group=world.group)
        return tensor

    return run


def _connections(operation: str) -> Make:
    def make(world: World) -> Run:
        from .own_routes import make_connections

        return make_connections(operation, world)

    return make


def _hierarchical(world: World) -> Run:
    from .own_routes import make_hierarchical

    return make_hierarchical(world)


def _parts(world: World) -> Run:
    """Return what gives room for one rank's part of a tensor; the same room for the same length."""
    rooms: dict[int, torch.Tensor] = {}

    def room(tensor: torch.Tensor) -> torch.Tensor:
        count = tensor.numel() // world.size
        if count not in rooms:
            rooms[count] = tensor.new_empty(count)
        return rooms[count]

    return room


ROUTES: dict[str, CollectiveRoute] = {
    "gloo": CollectiveRoute("gloo's own collectives", _gloo_all_reduce, _gloo_reduce_scatter, _gloo_all_gather),
    "connections": CollectiveRoute("ours, over our own connections", *map(_connections, OPERATIONS)),
    "hierarchical": CollectiveRoute("ours, shared memory inside hosts and connections across", _hierarchical),
}
