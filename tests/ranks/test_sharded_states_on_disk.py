"""`offload = "disk"` with every stage of ZeRO: this rank's shards in the file, the same bits as in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.optim import disk_states
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import own
from tests.ranks.sharded_cases import Case, Words, batches, check, full, loss_of
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts

pytestmark = pytest.mark.full("slow")

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adam fused": lambda p: torch.optim.Adam(p, 0.01, fused=True, amsgrad=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
}


def mapped_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of this rank's states in a mapping of a file, and elsewhere."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [tuple(int(at, 16) for at in line.split(" ")[0].split("-")) for line in lines if "deleted" in line]
    found = [0, 0]
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                local = value.to_local() if isinstance(value, DTensor) else value
                is_mapped = any(begin <= local.data_ptr() < end for begin, end in spans)
                found[0 if is_mapped or not local.numel() else 1] += local.nbytes
    return found[0], found[1]


class Run:
    """A training of `Words`."""

    def __init__(self, plan: Plan, make: Any = OPTIMIZERS["adamw"], seed: int = 1) -> None:
        self.model = Words(is_tied=True, unused=True, seed=seed)
        self.optimizer = make(self.model.parameters())
        fd.distribute(self.model, self.optimizer, plan)

    def train(self, first: int, last: int) -> None:
        for x, y in batches(8)[first:last]:
            self.optimizer.zero_grad()
            loss_of(self.model, own(x), own(y)).backward()
            self.optimizer.step()


def require_equal(one: Run, two: Run, what: str) -> None:
    for (name, mine), other in zip(full(one.model).items(), full(two.model).values(), strict=True):
        assert torch.equal(mine, other), f"{what}: {name}"


def compare_with_memory(keys: dict[str, Any], folder: Path) -> None:
    disk = {"offload": "disk", "offload_directory": str(folder), **keys}
    for kind, make in OPTIMIZERS.items():
        what = f"{keys}, {kind}"
        here, there = (Run(Plan.from_mapping(each, where="test"), make) for each in (keys, disk))
        for run in (here, there):
            run.train(0, 4)
        require_equal(here, there, what)
        inside, outside = mapped_bytes(there.optimizer)
        assert outside == 0, f"{what}: {outside} bytes are in memory"
        assert inside == sum(mapped_bytes(here.optimizer)), f"{what}: the shards and no more"
        assert mapped_bytes(here.optimizer)[0] == 0, f"{what}: the test can tell"
    fd.save(folder / f"saved {keys['zero']}", here.model, here.optimizer)
    again = Run(Plan.from_mapping(disk, where="test"), make, seed=5)
    fd.load(folder / f"saved {keys['zero']}", again.model, again.optimizer)
    assert mapped_bytes(again.optimizer) == (inside, 0), f"{keys}: loaded states are in the file at once"
    for run in (here, there, again):
        run.train(4, 6)
    require_equal(here, again, f"{keys}: resumed")
    fd.save(folder / f"of disk {keys['zero']}", there.model, there.optimizer)
    plain = Run(Plan(clip_norm=keys.get("clip_norm")), make, seed=6)
    fd.load(folder / f"of disk {keys['zero']}", plain.model, plain.optimizer)
    for run in (there, plain):
        run.train(6, 7)
    for name, value in full(there.model).items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


@takes(60)
@ranks(3)
def test_every_stage_trains_as_with_states_in_memory(tmp_path: Path) -> None:
    fd.init()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_states, "STATE_CHUNK_BYTES", 3 * 4096)  # several chunks, some of several parameters
        for zero in (1, 2, 3):
            compare_with_memory({"zero": zero, "clip_norm": 0.5}, tmp_path)
        plan = (("offload", "disk"), ("offload_directory", str(tmp_path)), ("accumulate", 2))
        check(Case("states on disk", plan=plan, micro=2), OPTIMIZERS["adamw"], "world")
        full_disk = pytest.raises(PlanError, match=r"rank 2: .*No space left on device, and the states are")
        if fd.world().rank == 2:
            patch.setattr(disk_states, "DiskFile", _full)
        for zero in (1, 3):
            model = Words()
            before = [type(model), *map(id, model.parameters())]
            with full_disk:
                fd.distribute(model, OPTIMIZERS["adamw"](model.parameters()), Plan(zero=zero, offload="disk"))
            assert [type(model), *map(id, model.parameters())] == before, "nothing was changed"


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@takes(60)
@ranks(4, **TWO_HOSTS)
def test_hybrid_trains_as_with_states_in_memory(tmp_path: Path) -> None:
    pretend_two_hosts()
    fd.init()
    compare_with_memory({"zero": 3, "shard_within": "host"}, tmp_path)
