"""``farandole measure``: what the machines give, into the file that ``farandole plan`` reads."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ...core.cluster import Cluster, compare_clusters
from ...core.cluster_file import read_cluster, write_cluster
from ...core.cluster_presets import preset_cluster
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ..main import parser
from ..options.files import check_output
from ..options.host_options import add_cluster_options
from .cluster_test import run_words

DEFAULT_FILE = "cluster.toml"
_EXAMPLES = """\
  farandole measure -np 2
  farandole measure -H node1:8,node2:8 --out cluster.toml
  farandole emulate --hosts 2 --rate 1gbit -- farandole measure --seconds 30
  farandole measure --preset dgx-a100 -np 64 --out dgx.toml
  farandole measure --preset 4xrtx-4090+25gbe -np 16
  farandole measure --compare monday.toml friday.toml
  farandole measure --from runs/a --from runs/b --cluster cluster.toml --out corrected.toml
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "measure",
        "Measure what the planner needs: computation by size and type, memory, every collective inside hosts\n"
        "and across them, codecs, how exchanges and computation slow each other down, loader and disk.\n"
        "Writes cluster.toml, each figure with its source and 95 % interval. Or writes a preset, measured\n"
        "nowhere; compares two files; or corrects a file by what runs of its plans took.",
        _EXAMPLES,
    )
    made.add_argument(
        "-np", "-n", "--np", "--num-proc", dest="size", type=int, metavar="N",
        help="number of ranks (default: one per core, or all slots of the hosts)",
    )  # fmt: skip
    made.add_argument("--out", metavar="FILE", help=f"file to write (default: {DEFAULT_FILE})")
    made.add_argument("--name", metavar="NAME", help="name of the cluster (default: that of its hosts, or preset)")
    made.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="about how long, from the ranks' start (default: 90)",
    )
    made.add_argument(
        "--preset", metavar="NAME",
        help="write published figures instead: a system (dgx-a100), a device, or DEVICE+NETWORK (a100+hdr-ib)",
    )  # fmt: skip
    made.add_argument(
        "--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="compare two files, and measure nothing"
    )
    made.add_argument(
        "--from", dest="from", action="append", metavar="RUN",
        help="correct --cluster by a run of a plan that was made with it; may be given several times",
    )  # fmt: skip
    made.add_argument("--cluster", metavar="FILE", help="with --from: the file that the plans were made with")
    made.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    add_cluster_options(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code: 0 done, 1 a rank failed, 2 bad usage or input."""
    made = make_parser()
    options = made.parse_args(arguments)
    if options.compare is not None:
        _refuse_others(made, options, "compare", ("json",))
        return _compare(options)
    if getattr(options, "from") is not None:
        _refuse_others(made, options, "from", ("json", "cluster", "out"))
        return _correct(options)
    if options.cluster is not None:
        raise ConfigError("--cluster has no effect without --from", remedy="name a run: --from runs/a")
    if options.preset is not None:
        _refuse_others(made, options, "preset", ("json", "size", "out", "name"))
    out = _check_out(options)
    if options.name is not None and not options.name.strip():
        raise ConfigError(f"--name {options.name!r}: expected a name", remedy="leave it out for the default")
    cluster = _with_price(_measure(options, out) if options.preset is None else _preset(options), out)
    write_cluster(cluster, out)
    from ...bench.cluster.measure import format_cluster

    print(json.dumps(dataclasses.asdict(cluster)) if options.json else format_cluster(cluster))
    if busy := cluster.fingerprint.get("busy"):
        write_notice(f"warning: {busy}")
    write_notice(f"written to {out}")
    return 0


def _check_out(options: argparse.Namespace) -> Path:
    out = check_output("--out", options.out or DEFAULT_FILE)
    assert out is not None, "a name was given"
    if out.suffix == ".json":
        raise ConfigError(f"--out {out}: a cluster is written as TOML", remedy="name a file that ends in .toml")
    return out


def _measure(options: argparse.Namespace, out: Path) -> Cluster:
    from ...bench.cluster.measure import DEFAULT_SECONDS, MOST_SECONDS, measure_cluster
    from ...bench.cluster.rounds import LEAST_SECONDS

    seconds = DEFAULT_SECONDS if options.seconds is None else options.seconds
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds {seconds:g}: expected {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    progress = ProgressLine()
    try:
        return measure_cluster(
            run_words(options), seconds=seconds, name=options.name or options.hosts or "this machine",
            disk=str(out.resolve().parent), say=progress.show,
        )  # fmt: skip
    finally:
        progress.end()


def _preset(options: argparse.Namespace) -> Cluster:
    if options.size is None:
        raise ConfigError(f"--preset {options.preset} without a number of ranks", remedy="add it: -np 16")
    cluster = preset_cluster(options.preset, options.size)
    return dataclasses.replace(cluster, name=options.name) if options.name else cluster


def _with_price(cluster: Cluster, out: Path) -> Cluster:
    """Return the cluster with the price of the file that it replaces: nothing measures it."""
    try:
        price = read_cluster(out).price_per_rank_hour
    except ConfigError:
        return cluster
    return dataclasses.replace(cluster, price_per_rank_hour=price)


def _refuse_others(
    made: argparse.ArgumentParser, options: argparse.Namespace, given: str, allowed: Sequence[str]
) -> None:
    """Refuse options that have no effect beside `given`."""
    for action in made._actions:
        is_set = getattr(options, action.dest, action.default) != action.default
        if is_set and action.dest not in (given, *allowed):
            raise ConfigError(
                f"{action.option_strings[0]} has no effect with --{given}, which measures nothing",
                remedy="leave one of them out",
            )


def _compare(options: argparse.Namespace) -> int:
    before, after = options.compare
    changes = compare_clusters(read_cluster(before), read_cluster(after))
    if options.json:
        print(json.dumps({"version": 1, "changes": [change.to_mapping() for change in changes]}))
        return 0
    from ...bench.cluster.measure import format_changes

    print(format_changes(changes, (Path(before).stem, Path(after).stem)))
    return 0


def _correct(options: argparse.Namespace) -> int:
    for name in ("cluster", "out"):
        if getattr(options, name) is None:
            raise ConfigError(
                f"--from without --{name}",
                remedy="for example: --from runs/a --cluster cluster.toml --out corrected.toml",
            )
    out, runs = _check_out(options), [Path(run) for run in getattr(options, "from")]
    before = read_cluster(options.cluster)
    from ...bench.cluster.from_runs import correct_cluster, describe_refit, refit_mapping

    found = correct_cluster(before, runs)
    write_cluster(found.cluster, out)
    print(json.dumps(refit_mapping(found)) if options.json else describe_refit(found, before))
    write_notice(f"written to {out}")
    return 0


class ProgressLine:
    """One line on a terminal that is drawn over itself; elsewhere a line for each change."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._length = 0

    def show(self, text: str) -> None:
        """Show `text`."""
        if not self._is_terminal:
            write_notice(text)
            return
        sys.stderr.write("\r" + text.ljust(self._length))
        sys.stderr.flush()
        self._length = len(text)

    def end(self) -> None:
        """Take the line away."""
        if self._is_terminal and self._length:
            sys.stderr.write("\r" + " " * self._length + "\r")
            sys.stderr.flush()
