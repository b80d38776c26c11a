"""A transformer block on the ranks of one host: tensor parallel, DTensor's own over gloo, and one rank alone.

    farandole run -np 2 --quiet -- python benchmarks/tensor_parallel.py

Width 1024, 512 tokens, 16 heads, float32, forward and backward, one thread a rank. ``ours`` is the plan key
`tensor`; ``stock`` is `torch.distributed.tensor.parallel.parallelize_module` over gloo; ``stock, our
backend`` the same over the backend "farandole". They take turns sample by sample; a sample's time is that of
the slowest rank. Before and after them rank 0 alone computes the whole block, while the others wait in the
kernel. Printed are medians in ms, the ratios of neighbours in time with a 95 % bootstrap interval, and the
collectives of one step of ``ours`` beside the formula: two sums of one activation forward and two backward
(Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

import farandole as fd
import farandole.backend
import models
from farandole.parallel.model import DistributedModel
from shared import alone, median_ms, medians_ms, paired, read_options, report, slowest_in_turns

RECIPE = {**dict.fromkeys(models.COLUMNS, "columns"), **dict.fromkeys(models.ROWS, "rows")}


def whole_block() -> models.Block:
    """Return the block with all its heads, alike on all ranks."""
    torch.manual_seed(0)
    return models.Block(models.BLOCK_HEADS, norms=True)


def main() -> None:
    arguments = read_options(__doc__, samples=40, only_ours=(False, "no stock contenders"))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own, of its older names
    world: Any = fd.init()
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(1, models.BLOCK_TOKENS, models.BLOCK_WIDTH, generator=draw, requires_grad=True)
    loss_of = models.mean_square_loss(x)
    whole = models.step_of(whole_block(), loss_of)
    block = whole_block()
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    fd.distribute(block, optimizer, fd.Plan(tensor=world.size, tensor_recipe=RECIPE))
    steps = {"ours": models.step_of(block, loss_of)}
    if not arguments.only_ours:
        farandole.backend.register()
        for name, backend in (("stock", "gloo"), ("stock, our backend", "farandole")):
            steps[name] = models.step_of(models.stock_block(dist.new_group(backend=backend), norms=True), loss_of)
    steps["ours"]()
    proofs = DistributedModel.of(block).proofs
    assert proofs is not None, "the block is split"
    proofs.ranks.calls.clear()
    proofs.ranks.bytes.clear()
    steps["ours"]()
    calls, nbytes = dict(proofs.ranks.calls), dict(proofs.ranks.bytes)

    before = alone(whole, arguments.samples // 2, world)
    times = slowest_in_turns(steps, arguments.samples)
    after = alone(whole, arguments.samples // 2, world)
    if world.rank:
        return
    medians, single = medians_ms(times, 2), median_ms(before + after, 2)
    found: dict[str, Any] = {
        "median_ms": {"one rank": single, **medians},
        "one rank over ours": round(single / medians["ours"], 3),
        "one rank, before and after, ms": [median_ms(each, 2) for each in (before, after)],
    }
    found |= {f"{name} over ours": paired(times[name], times["ours"]) for name in steps if name != "ours"}
    found["collectives of a step"] = {"calls": calls, "bytes": nbytes}
    found["formula"] = {"all_reduce": 4, "bytes": 4 * x.nbytes}
    report(found, indent=1)


if __name__ == "__main__":
    main()
