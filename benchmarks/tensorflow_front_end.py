"""The figures of the TensorFlow front end: steps of `fit` beside MultiWorkerMirroredStrategy, small operations.

    python benchmarks/tensorflow_front_end.py local --extra-path FOLDER --page docs/results/tensorflow.md
    python benchmarks/tensorflow_front_end.py links --extra-path FOLDER --page docs/results/tensorflow.md
    python benchmarks/tensorflow_front_end.py small-ops --page docs/results/tensorflow.md
    python benchmarks/tensorflow_front_end.py links --models mlp    # of one model
    python benchmarks/tensorflow_front_end.py local links small-ops --quick    # whether it runs; rough figures

``local``: two ranks on this machine, each bound to a core. Keras 3 with our `DistributedOptimizer`, the same with
tf_keras where that is supported, and tf_keras with MultiWorkerMirroredStrategy (ring over gRPC) train the same
models, in processes that take turns (A B C, C B A, ...). A ratio is that of the medians of two neighbours; printed
are the median of the ratios, the lowest and the highest. ``links``: the same on two emulated hosts at 200 Mbit/s,
and our optimizer with codecs, and by a plan that leaves the codec to be chosen (auto); the bound is the time that
the bytes need which the kernel counted at the host's link. ``small-ops``: eager allreduces of 4 kB, what a world
of one adds to a step, and what it takes to compile the operation. Each mode takes about 1 to 8 minutes; run them
on an idle machine.

tf_keras is found in ``--extra-path`` (``pip install --no-deps --target FOLDER tf_keras``), TensorFlow there too,
or where `make check` puts it. Without tf_keras there is no comparison with MultiWorkerMirroredStrategy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from farandole.bench.launch_ranks import Hosts, run_here
from farandole.bench.machine import busy_note, machine_facts, machine_line
from farandole.core.vocabulary.errors import FarandoleError
from farandole.core.vocabulary.units import parse_bits_per_second
from shared import Run, make_importable, make_parser, markdown, run_workers, say, write_figures

WORKER = "tensorflow_front_end_ranks"
LOCAL = Hosts(1, 2, None)
OURS, AUTO, LEGACY, THEIRS = "keras", "auto", "tf_keras", "mwms"
TITLES = {
    OURS: "`DistributedOptimizer`, Keras 3",
    LEGACY: "`DistributedOptimizer`, tf_keras",
    THEIRS: "MultiWorkerMirroredStrategy, tf_keras",
}
MEGABYTES = {"small": 3.31, "mlp": 23.3, "large": 94.6}
"""Of gradients."""
LOCAL_TARGETS = {"small": 1.05, "mlp": 1.00}
"""The most that a step may take, as a multiple of theirs."""
CODEC_TARGETS = {"mlp": 2.5, "large": 3.0}
"""How many times faster int8 is to be than the exact exchange."""


def main() -> int:
    options = read_options()
    find_tensorflow(options.extra_path)
    has_theirs = importlib.util.find_spec("tf_keras") is not None
    if not has_theirs:
        say("tf_keras is not there (--extra-path): no comparison with MultiWorkerMirroredStrategy")
    for mode in options.modes:
        facts, begin = machine_facts(), time.monotonic()
        lines = MODES[mode](options, has_theirs)
        head = f"{machine_line(facts)} {tensorflow_line()} Took {(time.monotonic() - begin) / 60:.1f} minutes."
        notes = [
            f"Note: {note}." for note in (busy_note(facts), "--quick: rough" if options.quick else None) if note
        ]
        figures = "\n".join([head, *notes, "", *lines])
        print(f"{mode}: {figures}\n", flush=True)
        if options.page is not None:
            write_figures(options.page, f"<!-- figures of {mode} -->", f"<!-- end of {mode} -->", figures)
    return 0


def read_options() -> argparse.Namespace:
    parser = make_parser(
        __doc__,
        rate=("200mbit", "of each emulated host's link (default: %(default)s)"),
        models=("mlp,large", "of links, of mlp and large (default: %(default)s)"),
        rounds=(int, "how often each contender runs (default: 4 local, 2 links)"),
        quick=(False, "a few steps, in about a minute a mode"),
        page=(Path, "page whose figures are replaced"),
    )
    parser.add_argument("modes", nargs="+", choices=sorted(MODES), help="what to measure")
    parser.add_argument("--extra-path", action="append", default=[], help="folder with tf_keras or TensorFlow")
    return parser.parse_args()


def find_tensorflow(folders: Sequence[str]) -> None:
    """Let ranks find the workers, TensorFlow and tf_keras."""
    found = [str(Path(folder).resolve()) for folder in folders]
    beside = Path(sys.prefix) / "tensorflow"
    if beside.is_dir():
        found.append(str(beside))
    sys.path += found
    make_importable(*found)
    for name, value in (("TF_CPP_MIN_LOG_LEVEL", "2"), ("TF_NUM_INTRAOP_THREADS", "1"), ("OMP_NUM_THREADS", "1")):
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("tensorflow") is None:
        raise FarandoleError(
            "TensorFlow is not installed", remedy="pip install tensorflow-cpu, or --extra-path FOLDER"
        )


def tensorflow_line() -> str:
    """Return the versions, without an import of TensorFlow."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("tensorflow-cpu", "tensorflow", "keras", "tf_keras"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{', '.join(found)}."


def local(options: argparse.Namespace, has_theirs: bool) -> list[str]:
    """Two ranks on this machine."""
    models = "small:10,mlp:5" if options.quick else "small:60,mlp:20"
    words = ["--models", models, "--blocks", "1" if options.quick else "3"]
    kinds = [OURS, LEGACY, THEIRS] if has_theirs else [OURS]
    runs = in_turns(LOCAL, kinds, words, options.rounds or (1 if options.quick else 4), {})
    rows = [
        [
            model, f"{MEGABYTES[model]:g} MB", TITLES[kind],
            milliseconds(median_of(runs[kind], model, main_contender(kind))),
            milliseconds(median_of(runs[kind], model, "alone")), ratio_text(runs, kind, model),
            f"<= {LOCAL_TARGETS[model]:.2f}" if kind == OURS else "",
        ]
        for model in ("small", "mlp")
        for kind in runs
    ]  # fmt: skip
    head = "model | gradients | what | ms a step | alone, ms | over MWMS (lowest to highest) | target"
    note = "Medians of all steps. Alone: the same `fit` without an exchange, on both ranks at once."
    return [markdown(head, rows, right=(1, 3, 4, 5, 6)), "", note]


def links(options: argparse.Namespace, has_theirs: bool) -> list[str]:
    """Two emulated hosts on a slow link."""
    rate = parse_bits_per_second(options.rate)
    models = options.models.split(",")
    counts = {"mlp": 2, "large": 1} if options.quick else {"mlp": 4, "large": 2}
    words = ["--models", ",".join(f"{model}:{counts[model]}" for model in models)]
    words += ["--blocks", "1" if options.quick else "2"]
    codecs = ["--contenders", "alone,exact,int8,int4"]
    kinds = [OURS, AUTO, THEIRS] if has_theirs else [OURS, AUTO]
    hosts = Hosts(2, 1, rate)
    more = {OURS: codecs, AUTO: ["--contenders", AUTO]}
    runs = in_turns(hosts, kinds, words, options.rounds or (1 if options.quick else 2), more)
    rows = []
    for model in models:
        exact = median_of(runs[OURS], model, "exact")
        contenders = [(OURS, each) for each in ("alone", "exact", "int8", "int4")] + [(AUTO, AUTO)]
        contenders += [(THEIRS, "mwms")] if THEIRS in runs else []
        for kind, contender in contenders:
            mine = median_of(runs[kind], model, contender)
            sent = sent_of(runs[kind], model, contender)
            targets = {"exact": "<= 1.00 MWMS", "int8": f">= {CODEC_TARGETS[model]:g} x"}
            rows.append([
                model, f"{MEGABYTES[model]:g} MB", TITLES[THEIRS] if kind == THEIRS else contender,
                milliseconds(mine), f"{sent / 1e6:.1f}", f"{8e3 * sent / rate:.0f}",
                ratio_text(runs, kind, model) if contender == "exact" else "",
                f"{exact / mine:.2f} x" if contender in {"int8", "int4", AUTO} and exact and mine else "",
                targets.get(contender, ""),
            ])  # fmt: skip
    head = "model | gradients | what | ms a step | sent, MB | bound, ms | over MWMS | exact over it | target"
    note = (
        f"Two emulated hosts, one rank each, links of {options.rate}. Sent: bytes of a host and step, headers "
        "included, counted by the kernel. Bound: what these bytes need at the rate, without compute (alone)."
    )
    return [markdown(head, rows, right=(1, 3, 4, 5, 6, 7, 8)), "", note]


def small_ops(options: argparse.Namespace, _: bool) -> list[str]:
    """Operations of 4 kB, a world of one, and the compiler."""
    blocks = "2" if options.quick else "10"
    operations = run_workers(LOCAL, WORKER, ["operations", "--blocks", blocks])
    models = "small:10" if options.quick else "small:60"
    one = run_alone(["one", "--models", models, "--blocks", blocks, "--calls", "300"])
    compiled = [compile_once() for _ in range(1 if options.quick else 3)]
    fit = one["fit"]["small"]["seconds"]
    added = [
        statistics.median(mine) - statistics.median(alone)
        for mine, alone in zip(fit["exact"], fit["alone"], strict=True)
    ]
    alone_ms = milliseconds(statistics.median(second for block in fit["alone"] for second in block))
    in_graph = statistics.median(one["graph"]["with"]) - statistics.median(one["graph"]["without"])
    rows = []
    for name, title, target in (
        ("eager", "`hvd.allreduce` of 4 kB, eager, two ranks", "<= 0.25 ms"),
        ("graph", "the same in a `tf.function`", ""),
        ("graph without it", "a `tf.function` without it", ""),
        ("torch", "the same of `farandole.horovod.torch`", ""),
    ):
        seconds = sorted(operations[name])
        figures = [statistics.median(seconds), seconds[len(seconds) // 4], seconds[0]]
        rows.append([title, target, *(f"{1e3 * each:.3f} ms" for each in figures)])
    step = f"a world of one adds to a step of `fit`, model small (alone {alone_ms} ms)"
    rows.append([step, "<= 0.3 ms", f"{1e3 * statistics.median(added):.3f} ms", "", f"{1e3 * min(added):.3f} ms"])
    graph = "an allreduce of 4 kB in a graph adds in a world of one"
    rows.append([graph, "<= 0.3 ms", f"{1e3 * in_graph:.3f} ms", "", ""])
    for key, title, target in (
        ("cpu_seconds", "CPU time to compile the operation", "<= 2 s"),
        ("wall_seconds", "wall-clock time of the same", ""),
    ):
        taken = [each[key] for each in compiled]
        rows.append([title, target, f"{statistics.median(taken):.2f} s", "", f"{min(taken):.2f} s"])
    return [markdown("figure | target | median | lower quartile | lowest", rows, right=(1, 2, 3, 4))]


MODES: dict[str, Callable[[argparse.Namespace, bool], list[str]]] = {
    "local": local,
    "links": links,
    "small-ops": small_ops,
}


def in_turns(
    hosts: Hosts, kinds: Sequence[str], words: Sequence[str], rounds: int, more: dict[str, list[str]]
) -> dict[str, list[Run]]:
    """Run each kind `rounds` times in turn; return its results. A kind that is not supported is left out."""
    found: dict[str, list[Run]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in list(found)[:: -1 if number % 2 else 1]:
            say(f"round {number + 1} of {rounds}: {kind}")
            peers = ["--peers", ",".join(addresses(hosts))] if kind == THEIRS else []
            run = run_workers(hosts, WORKER, [kind, *words, *more.get(kind, []), *peers])
            if "refused" in run:
                say(f"{kind} is left out: {run['refused']}")
                del found[kind]
            else:
                found[kind].append(run)
    return found


def addresses(hosts: Hosts) -> list[str]:
    """Return where TensorFlow's own ranks listen."""
    found = []
    for rank in range(hosts.size):
        with socket.socket() as free:
            free.bind(("", 0))
            found.append(f"{'localhost' if hosts.loopback else f'10.211.0.{rank + 1}'}:{free.getsockname()[1]}")
    return found


def run_alone(words: Sequence[str], **variables: str) -> Run:
    """Run the worker as one process without a launcher; return what it found."""
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", WORKER, *words, "--output", str(output)]
        if code := run_here(["env", *(f"{name}={value}" for name, value in variables.items()), *command]):
            raise FarandoleError(f"{' '.join(words)} ended with {code}", remedy="what it said is above")
        result: Run = json.loads(output.read_text())
        return result


def compile_once() -> Run:
    """Make the operation in an empty cache."""
    with tempfile.TemporaryDirectory(prefix="farandole-cache-") as cache:
        return run_alone(["compiler"], XDG_CACHE_HOME=cache)


def main_contender(kind: str) -> str:
    return "mwms" if kind == THEIRS else "exact"


def median_of(runs: Sequence[Run], model: str, contender: str) -> float | None:
    """Return the median of all steps of all rounds, in seconds."""
    steps = [second for run in runs for block in run[model]["seconds"].get(contender, []) for second in block]
    return statistics.median(steps) if steps else None


def sent_of(runs: Sequence[Run], model: str, contender: str) -> float:
    return float(statistics.median([count for run in runs for count in run[model]["sent_bytes"][contender]]))


def ratio_text(runs: dict[str, list[Run]], kind: str, model: str) -> str:
    """Return the ratio of neighbours in time: ours over theirs."""
    if kind == THEIRS or THEIRS not in runs:
        return ""
    ratios = []
    for mine, theirs in zip(runs[kind], runs[THEIRS], strict=True):
        ours, other = median_of([mine], model, main_contender(kind)), median_of([theirs], model, "mwms")
        assert ours is not None, "every run has its steps"
        assert other is not None, "every run has its steps"
        ratios.append(ours / other)
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FarandoleError, subprocess.SubprocessError) as problem:
        sys.exit(f"tensorflow_front_end: {problem}")
