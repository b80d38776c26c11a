"""``farandole test``: prove that hosts train together, or that a device does. At the end: PASSED or FAILED."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...bench.cluster_test import Proof, prove, prove_device
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ...core.vocabulary.units import format_seconds
from ...launch.doctor.checks import weakest_link
from ...launch.doctor.examine import examine
from ...launch.job.hosts import HostFinder
from ..main import parser
from ..options.host_options import add_cluster_options, read_cluster, read_targets, with_slots

MOST_SECONDS = 600.0
SECONDS = 45.0
_EXAMPLES = """\
  farandole test -np 2
  farandole test -H node1:8,node2:8
  farandole test --hostfile hosts --seconds 120 --json
  farandole emulate --hosts 2 --rate 1gbit -- farandole test
  farandole test --device cuda
"""
_MARKS = {True: "ok", False: "FAIL", None: "not checked"}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "test",
        "Run a real job over all hosts: every collective against a local computation, the rate between hosts\n"
        "against that of the weakest link, a small model trained and verified. PASSED or FAILED.\n"
        "With --device: codecs and the engine on the devices of this machine, against the CPU.",
        _EXAMPLES,
    )
    made.add_argument(
        "-np", "-n", "--np", "--num-proc", dest="size", type=int, metavar="N",
        help="number of processes (default: one per core, or all slots of the hosts)",
    )  # fmt: skip
    made.add_argument("--seconds", type=float, metavar="S", help=f"how long to train (default: {SECONDS:g})")
    made.add_argument(
        "--device", metavar="KIND",
        help="check the devices of this machine instead, of a kind of torch.accelerator: cuda, xpu, ...; or cpu",
    )  # fmt: skip
    made.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    add_cluster_options(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code: 0 passed, 1 failed, 2 bad usage."""
    options = make_parser().parse_args(arguments)
    if options.device is not None:
        return test_device(options)
    seconds = SECONDS if options.seconds is None else options.seconds
    if not 1 <= seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds {seconds:g}: expected 1 to {MOST_SECONDS:g}")
    targets = read_targets(options, read_cluster(options))
    expected = None
    if len(targets) > 1:
        facts = examine(targets, write_notice)
        for lost in facts.unreachable:
            write_notice(f"{lost.name}: {lost.cause}; {lost.remedy}")
        weakest = weakest_link(facts)
        expected = None if weakest is None else weakest.bits_per_second
    emulated = HostFinder.of_this_process().emulated
    proof = prove(
        run_words(options), seconds=seconds, expected=expected, shared_cores=bool(emulated),
        say=write_notice,
    )  # fmt: skip
    print(json.dumps(proof.to_mapping()) if options.json else page(proof))
    return 0 if proof.passed else 1


def test_device(options: argparse.Namespace) -> int:
    """Check the devices of this machine; return the exit code: 0 passed, 1 failed."""
    others = run_words(options) + ([] if options.seconds is None else ["--seconds"])
    if others:
        raise ConfigError(f"--device checks this machine alone, and takes no {others[0].partition('=')[0]}")
    proof = prove_device(options.device, say=write_notice)
    print(json.dumps(proof.to_mapping()) if options.json else page(proof))
    return 0 if proof.passed else 1


def run_words(options: argparse.Namespace) -> list[str]:
    """Return the options of ``farandole run`` that place a job where this line says."""
    words = [] if options.size is None else ["-np", str(options.size)]
    if options.hosts is not None:
        words += ["-H", with_slots(options.hosts)]
    if options.hostfile is not None:
        words += ["--hostfile", str(Path(options.hostfile))]
    for name in (
        "include",
        "exclude",
        "ssh_port",
        "ssh_identity_file",
        "ssh_command",
        "python",
        "chdir",
        "prelude",
    ):
        value = getattr(options, name)
        if value is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    words += [f"--ssh-option={option}" for option in options.ssh_options]
    for variable in options.variables:
        words += ["-x", variable]
    return words


def page(proof: Proof) -> str:
    """Return the result as text; its last word is the verdict."""
    lines = list(proof.failure)
    for check in proof.checks:
        mark = check.get("word") or _MARKS[check["passed"]]
        lines.append(f"{mark:>11}  {check['name']}: {check['answer']}")
        if check["passed"] is False and check["remedy"]:
            lines.append(f"{'':>11}  -> {check['remedy']}")
    if proof.ranks:
        lines.append(f"{proof.ranks} ranks on {proof.hosts} host(s), {format_seconds(proof.seconds)}")
    lines.append("PASSED" if proof.passed else "FAILED")
    return "\n".join(lines)
