"""The command-line flags: a list that changes on purpose, together with the documentation."""

from __future__ import annotations

from argparse import ArgumentParser, _SubParsersAction

from farandole.cli.main import COMMANDS, load_command

FLAGS = {
    "demo": ["--dataset", "--json", "--run-dir", "--steps"],
    "run": [
        "--account", "--as-horovod", "--autotune", "--autotune-bayes-opt-max-samples",
        "--autotune-gaussian-process-noise", "--autotune-log-file", "--autotune-steps-per-sample",
        "--autotune-warmup-samples", "--backend", "--baseline", "--binding-args", "--blacklist-cooldown-range",
        "--cache-capacity", "--chdir", "--check-build", "--config-file", "--cpus-per-rank",
        "--cycle-time-ms", "--disable-cache", "--dry-run", "--elastic-timeout", "--exclude",
        "--fusion-threshold-mb", "--gloo", "--gloo-timeout-seconds", "--gpus-per-node", "--grace",
        "--hierarchical-allgather", "--hierarchical-allreduce", "--host-discovery-script", "--hostfile",
        "--hosts", "--image", "--include", "--job-name", "--json", "--jsrun", "--kind",
        "--log-hide-timestamp", "--log-level", "--log-with-timestamp", "--log-without-timestamp",
        "--max-np", "--max-num-proc", "--max-restarts", "--min-np", "--min-num-proc", "--mpi", "--mpi-args",
        "--mpi-launch-flag", "--mpi-threads-disable", "--namespace", "--network-interface", "--network-interfaces",
        "--no-autotune", "--no-bind", "--no-hierarchical-allgather", "--no-hierarchical-allreduce",
        "--no-log-hide-timestamp", "--no-mpi-threads-disable", "--no-record", "--no-stall-check",
        "--no-timeline-mark-cycles", "--no-torus-allreduce", "--nodes", "--np", "--num-nccl-streams",
        "--num-proc", "--on", "--output-filename", "--output-prefix", "--partition", "--plan",
        "--prefix-output-with-timestamp", "--prelude", "--priority", "--python", "--qos", "--queue",
        "--quiet", "--reset-limit", "--restarts", "--run-dir", "--runtime", "--set", "--slots",
        "--slots-per-host", "--spares", "--ssh-command", "--ssh-identity-file", "--ssh-option", "--ssh-port",
        "--stall-check", "--stall-check-shutdown-time-seconds", "--stall-check-warning-time-seconds",
        "--start-timeout", "--tcp", "--thread-affinity", "--time", "--timeline-filename",
        "--timeline-mark-cycles", "--torus-allreduce", "--verbose", "--version", "--warn-before", "-H",
        "-cb", "-hostfile", "-i", "-n", "-np", "-o", "-p", "-prefix-timestamp", "-v", "-x",
    ],
    "verify": [
        "--as-horovod", "--deep", "--json", "--no-bind", "--np", "--num-proc", "--plan",
        "--run-dir", "--set", "--steps", "-n", "-np",
    ],
    "tune": [
        "--allow-lossy", "--backend", "--budget", "--chdir", "--exclude", "--hostfile", "--hosts", "--include",
        "--json", "--no-bind", "--no-cache", "--np", "--num-proc", "--plan", "--prelude", "--python",
        "--run-dir", "--set", "--settings", "--ssh-command", "--ssh-identity-file",
        "--ssh-option", "--ssh-port", "--steps", "--trials", "-H", "-hostfile", "-i", "-n", "-np", "-p", "-x",
    ],
    "doctor": [
        "--chdir", "--exclude", "--hostfile", "--hosts", "--include", "--json", "--prelude", "--python",
        "--ssh-command", "--ssh-identity-file", "--ssh-option", "--ssh-port", "-H", "-hostfile", "-i", "-p",
        "-x",
    ],
    "test": [
        "--chdir", "--device", "--exclude", "--hostfile", "--hosts", "--include", "--json", "--np", "--num-proc",
        "--prelude", "--python", "--seconds", "--ssh-command", "--ssh-identity-file", "--ssh-option",
        "--ssh-port", "-H", "-hostfile", "-i", "-n", "-np", "-p", "-x",
    ],
    "emulate": [
        "--as-horovod", "--backend", "--congestion-control", "--hosts", "--json", "--latency", "--no-record",
        "--plan", "--quiet", "--rate", "--rate-between", "--run-dir", "--script", "--set", "--slots",
    ],
    "estimate": [
        "--batch", "--context", "--device", "--expert", "--find", "--global-batch", "--input", "--json", "--loss",
        "--memory", "--np", "--optimizer", "--pipeline", "--precision", "--ranks", "--ranks-per-host",
        "--recompute", "--stage", "--tensor",
    ],
    "measure": [
        "--chdir", "--cluster", "--compare", "--exclude", "--from", "--hostfile", "--hosts", "--include",
        "--json", "--name", "--np", "--num-proc", "--out", "--prelude", "--preset", "--python", "--seconds",
        "--ssh-command", "--ssh-identity-file", "--ssh-option", "--ssh-port", "-H", "-hostfile", "-i", "-n",
        "-np", "-p", "-x",
    ],
    "plan": [
        "--allow-lossy", "--batch", "--cluster", "--draw", "--effort", "--fix", "--global-batch", "--goal",
        "--gpus", "--hosts", "--json", "--loss", "--measure", "--memory", "--micro-batches", "--optimizer",
        "--out", "--precision", "--profile", "--set", "--trials", "-H",
    ],
    "explain": ["--batch-size", "--critical-batch", "--html", "--json"],
    "simulate": [
        "--checkpoint-every", "--checkpoint-seconds", "--cluster", "--fail-every", "--global-batch", "--gpus",
        "--html", "--json", "--loader-workers", "--profile", "--restart", "--scaling", "--set", "--slow-rank",
        "--storage-rate",
    ],
    "bench": [],
    "bench collectives": [
        "--congestion-control", "--hosts", "--json", "--link", "--operations", "--rate", "--rounds",
        "--routes", "--sizes", "--slots",
    ],
    "bench codecs": ["--codecs", "--json", "--rounds"],
    "bench step": [
        "--batch", "--congestion-control", "--contenders", "--hosts", "--json", "--link",
        "--model", "--plan", "--precision", "--rate", "--rounds", "--set", "--slots",
    ],
    "bench scaling": [
        "--batch", "--compare", "--hosts", "--html", "--json", "--mode", "--np", "--output", "--plan", "--rounds",
        "--set", "-H",
    ],
    "top": ["--every", "--json", "--once", "--python", "--ssh-command"],
    "report": ["--baseline", "--every", "--json", "--output", "--watch", "-o"],
    "diagnose": ["--batch-size", "--critical-batch", "--fail-over", "--json", "--measure-codecs"],
    "compare": ["--json"],
    "export": ["--json", "--output", "--steps", "--to", "-o"],
    "checkpoint": [],
    "checkpoint list": ["--json"],
    "checkpoint verify": ["--json", "--step"],
    "checkpoint export": ["--json", "--max-shard-size", "--module", "--step"],
    "checkpoint convert": ["--from", "--json", "--module", "--step", "--to"],
    "checkpoint prune": ["--dry-run", "--json", "--keep", "--keep-every"],
    "timeline": ["--json", "--output", "-o"],
}  # fmt: skip


def parsers() -> dict[str, ArgumentParser]:
    """Return the parser of every command, and of the commands of ``bench`` and ``checkpoint``."""
    found = {}
    for command in COMMANDS:
        module = load_command(command)
        found[command] = module.make_parser()
        for name, (make_parser, _) in getattr(module, "BENCHMARKS", {}).items():
            found[f"{command} {name}"] = make_parser()
        for action in found[command]._actions:
            if isinstance(action, _SubParsersAction):
                found |= {f"{command} {name}": own for name, own in action.choices.items()}
    return found


def test_flags() -> None:
    found = {}
    for command, parser in parsers().items():
        options = parser._option_string_actions
        found[command] = sorted(set(options) - {"-h", "--help"})
        for action in options.values():
            assert action.help, f"{command} {action.option_strings}: no help"
    assert found == FLAGS
