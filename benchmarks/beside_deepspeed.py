"""Steps of DDP, FSDP2, DeepSpeed and Farandole on two hosts, a job each, in turns.

    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed
    python benchmarks/beside_deepspeed.py --rounds 2 --steps 3 --out docs/results/beside-deepspeed.json

The model is that of `farandole bench step`, a language model of 27.4 million parameters, in float32 by SGD with
momentum, two sequences a rank. DeepSpeed runs on CPUs by gloo (DS_ACCELERATOR=cpu). A job trains a step, and times
`--steps` of them on the slower rank. Printed, and with `--out` written as JSON: the median seconds of a step, all
of them, the bytes that a rank sent for one, and the loss after them, which is the same where nothing is lossy.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shared import FARANDOLE, Run, is_main, make_importable, make_parser, of_slowest, report, say, take_turns

PLANS: dict[str, dict[str, Any]] = {
    "farandole": {},
    "farandole int8": {"codec": "int8"},
    "farandole zero=3": {"zero": 3},
    "farandole zero=3 int8 both ways": {"zero": 3, "codec": "int8", "weight_codec": "int8"},
}
STOCK = ["ddp", "fsdp2", "deepspeed 1", "deepspeed 2", "deepspeed 3"]
NAMES = [*STOCK, *PLANS]
SEQUENCES, LEARNING_RATE = 2, 0.05


def main() -> None:
    parser = make_parser(
        __doc__,
        rate=("200mbit", "of the link between both hosts"),
        rounds=(2, "jobs of each contender"),
        steps=(3, "timed in a job"),
        train=(str, "train this contender here: what a job runs", NAMES),
        out=(Path, "write what was measured, as JSON"),
    )
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps, options.out)
        return
    found = take_turns({name: partial(run_job, name, options) for name in NAMES}, options.rounds, warm_up=0)
    rows = {}
    for name, jobs in found.items():
        seconds = [each for job in jobs for each in job["seconds"]]
        rows[name] = {
            "median_seconds": round(statistics.median(seconds), 3),
            "seconds": [round(each, 3) for each in seconds],
            "sent_bytes": max(job["sent_bytes"] for job in jobs),
            "loss": round(jobs[-1]["loss"], 6),
        }
        say(f"{name}: {rows[name]['median_seconds']:.2f} s a step")
    facts = {
        "rate": options.rate, "rounds": options.rounds, "steps": options.steps, "deepspeed": version("deepspeed"),
        "jobs": "2 ranks, one a host, one thread each",
    }  # fmt: skip
    report({**facts, "contenders": rows}, indent=1, out=options.out)


def run_job(name: str, options: Any) -> Run:
    """Train one contender on two emulated hosts; return what its rank 0 wrote."""
    make_importable()
    with tempfile.TemporaryDirectory() as place:
        found = Path(place) / "found.json"
        launch = [*FARANDOLE, "emulate", "--hosts", "2", "--rate", options.rate, "--quiet", "--run-dir", place]
        job = [sys.executable, __file__, "--train", name, "--steps", str(options.steps), "--out", str(found)]
        done = subprocess.run([*launch, "--", *job], env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=False)
        # FSDP2's ranks may end with an abort of gloo's threads after the last step: the figures are there.
        if done.returncode and not found.exists():
            raise SystemExit(done.returncode)
        result: Run = json.loads(found.read_text())
    say(f"{name}: {', '.join(f'{each:.2f}' for each in result['seconds'])} s")
    return result


def train(name: str, steps: int, out: Path) -> None:
    """Train `name` on this rank; rank 0 writes the seconds of each step on the slower rank."""
    import torch
    import torch.distributed as dist

    from farandole.bench.intervals import sent_bytes

    warnings.simplefilter("ignore")  # torch's own, of its older names
    torch.set_num_threads(1)
    step = make_step(name)
    torch.manual_seed(1 + int(os.environ["RANK"]))  # nothing that joining drew is in what is dropped out
    step()
    dist.barrier()
    seconds, before = [], sent_bytes(loopback=False)
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - begin)
    dist.barrier()
    sent = (sent_bytes(loopback=False) - before) / steps
    seconds = of_slowest(seconds)
    if is_main():
        out.write_text(json.dumps({"seconds": seconds, "sent_bytes": round(sent), "loss": loss}))
    dist.barrier()
    time.sleep(2)  # gloo loses what is on its way when a rank leaves, and the other one waits for it
    dist.destroy_process_group()


def make_step(name: str) -> Callable[[], float]:
    """Join the other rank and return a step of training of `name`, which returns this rank's loss."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import farandole as fd
    from farandole.bench.step_worker import WORKS
    from farandole.parallel.blocks import repeated_blocks

    work = WORKS["lm27"]
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = work.make()
    batch = work.make_batch(SEQUENCES, torch.Generator().manual_seed(1 + rank))
    make_optimizer = partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9)
    if name.startswith("deepspeed"):
        return deepspeed_step(int(name.split()[1]), model, make_optimizer, lambda engine: work.loss(engine, batch))
    if name in PLANS:
        fd.init()
        optimizer = make_optimizer(model.parameters())
        fd.distribute(model, optimizer, fd.Plan(**PLANS[name]))
    else:
        dist.init_process_group("gloo")
        if name == "ddp":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            for _, block in repeated_blocks(model):
                fully_shard(block)
            fully_shard(model)
        optimizer = make_optimizer(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def deepspeed_step(
    stage: int, model: Any, make_optimizer: Callable[..., Any], loss_of: Callable[[Any], Any]
) -> Callable[[], float]:
    """Join the other rank and return a step by DeepSpeed's ZeRO."""
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": SEQUENCES,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # its default is a norm of 1
        },
    )

    def step() -> float:
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        return float(loss)

    return step


if __name__ == "__main__":
    main()
