"""A real trace of PyTorch's profiler over real ranks, imported."""

from __future__ import annotations

import sys
from pathlib import Path

from farandole.observe.format.phases import step_seconds
from farandole.observe.importers import import_traces
from farandole.observe.read.timeline_reader import read_events
from tests.ranks.test_launch import script
from tests.warm import run

PROFILED = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, TensorDataset

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.1 if dist.get_rank() == 1 else 0.0)
        return grad

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(100, 100))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 100)), batch_size=8)
plan = schedule(wait=0, warmup=2, active=4, repeat=1)
with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiler:
    for (x,), _ in zip(loader, range(6)):
        optimizer.zero_grad()
        Slow.apply(model(x)).square().mean().backward()
        optimizer.step()
        profiler.step()
profiler.export_chrome_trace(f"trace{dist.get_rank()}.json")
dist.destroy_process_group()
"""


def test_a_real_trace_of_ddp_on_two_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "-np", "2", "--quiet", "--", sys.executable, script(tmp_path, PROFILED))
    assert done.returncode == 0, done.stderr
    import_traces([tmp_path / "trace0.json", tmp_path / "trace1.json"], tmp_path / "run")
    quick, slow = (read_events(tmp_path / f"run/events-rank{rank}.jsonl").steps for rank in (0, 1))
    assert len(quick) == len(slow) == 4
    for mine, theirs in zip(quick, slow, strict=True):
        assert step_seconds(theirs)["backward"] > 0.1
        assert step_seconds(mine)["backward"] < 0.05
        assert step_seconds(mine)["exchange"] > 0.06, "rank 0 waits for rank 1's backward"
        assert step_seconds(mine)["forward"] > 0.02
        assert len(mine.exchanges[0].buckets) == 1
        assert step_seconds(mine).keys() >= {"data", "optimizer"}
    assert abs(quick[1].begin_seconds - slow[1].begin_seconds) < 0.05, "one clock"
