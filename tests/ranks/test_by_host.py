"""Named operations where hosts have several ranks: what is large meets inside each host before it crosses.

Four processes of this machine pretend to be two hosts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.vocabulary.errors import Mismatch
from farandole.horovod.named_ops.engine import NamedOpsEngine
from tests.ranks.pool import ranks
from tests.ranks.test_coded_engine import segments_of
from tests.ranks.test_negotiate import COMPLEX, FLOATS, INTEGERS, LARGE, engine, numbers, run, sums
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts


def circles(on: NamedOpsEngine) -> set[tuple[int, ...]]:
    """Return a set that holds, from now on, the ranks of each group that large operations exchange messages in."""
    plane = on._controller.state.plane
    assert plane is not None
    seen: set[tuple[int, ...]] = set()
    start = plane._transport.start

    def noting(message: Any, tag: int, circle: Any) -> Any:
        seen.add(circle.ranks)
        return start(message, tag, circle)

    plane._transport.start = noting  # type: ignore[method-assign]
    return seen


def own_groups(rank: int) -> set[tuple[int, ...]]:
    return {(0, 1) if rank < 2 else (2, 3), (0, 2) if rank % 2 == 0 else (1, 3)}


@pytest.mark.full("further")
@ranks(4, **TWO_HOSTS)
def test_sums_of_all_types_and_reductions() -> None:
    pretend_two_hosts()
    rank = fd.init().rank
    with engine() as it:
        assert it.by_host
        seen = circles(it)
        for dtype in [*INTEGERS, *FLOATS, *COMPLEX, torch.bool]:
            for count in (LARGE, LARGE + 1, LARGE + 3):
                mine, name = numbers(rank, count, dtype), f"{dtype}{count}"
                before = mine.clone()
                assert run(it, name, "allreduce", mine).equal(sums(dtype, count, 4).to(dtype)), name
                assert mine.equal(before), "the input is left alone"
        everyone = torch.stack([numbers(r, LARGE + 1, torch.float32) for r in range(4)])
        mine = everyone[rank].clone()
        assert run(it, "min", "allreduce", mine, reduction="min").equal(everyone.amin(0))
        assert run(it, "max", "allreduce", mine, reduction="max").equal(everyone.amax(0))
        assert run(it, "product", "allreduce", mine, reduction="product").equal(everyone.prod(0))
        scaled = run(it, "scales", "allreduce", mine, prescale=0.5, postscale=3.0)
        assert scaled.equal((everyone * 0.5).sum(0) * 3.0)
        mean = run(it, "mean", "allreduce", mine, reduction="average", in_place=True)
        assert mean is mine
        assert mean.equal(everyone.mean(0))
        assert seen == own_groups(rank)


@ranks(4, **TWO_HOSTS)
def test_narrow_floats_are_rounded_once() -> None:
    """The sum of a host, 257, is no bfloat16: rounded there, the sum of all would be 512."""
    pretend_two_hosts()
    rank = fd.init().rank
    with engine() as it:
        mine = torch.full((LARGE,), (256.0, 1.0, 256.0, 1.0)[rank], dtype=torch.bfloat16)
        assert run(it, "narrow", "allreduce", mine).eq(torch.tensor(514.0, dtype=torch.bfloat16)).all()
        half = torch.full((LARGE,), 40_000.0, dtype=torch.float16)  # the sum of a host is no float16 at all
        assert run(it, "half", "allreduce", half, reduction="average").eq(40_000.0).all()


@pytest.mark.gate_cases("powersgd:2")
@pytest.mark.parametrize("codec", ["int8", "int4", "sign", "topk:0.05", "powersgd:2"])
@ranks(4, **TWO_HOSTS)
def test_codecs_send_the_mean_of_a_host_and_keep_what_they_lost(codec: str) -> None:
    pretend_two_hosts()
    world = fd.init()
    everyone = torch.stack([torch.randn(300, 257, generator=torch.Generator().manual_seed(r)) for r in range(4)])
    mean = everyone.mean(0)
    with engine() as it:
        seen, total = circles(it), torch.zeros_like(mean)
        steps = 40
        for _ in range(steps):
            got = run(it, "gradient", "allreduce", everyone[world.rank], reduction="average", codec=codec)
            total += got
        first = all_gather_json(world, "test/bits", got.double().sum().item())
        assert len(set(first)) == 1, "the same bits on all ranks"
        off = (total / steps - mean).norm() / mean.norm()
        assert off < {"topk:0.05": 0.6, "powersgd:2": 0.9, "sign": 0.3}.get(codec, 0.01), off
        flat = codec.startswith("powersgd")
        everybody = {(0, 1, 2, 3)}
        assert seen == (everybody if flat else everybody | own_groups(world.rank))
        summed = run(it, "sum", "allreduce", everyone[world.rank], codec="int8")
        assert (summed - 4 * mean).norm() / (4 * mean).norm() < 0.02
        broken = everyone[world.rank].clone()
        broken[7, 7] = torch.inf if world.rank == 1 else 0.0
        assert run(it, "gradient", "allreduce", broken, codec=codec).isnan().all()
        again = run(it, "gradient", "allreduce", everyone[world.rank], reduction="average", codec=codec)
        assert again.isfinite().all()


@pytest.mark.full("further")
@ranks(4, **TWO_HOSTS)
def test_numbers_that_are_not_finite_in_several_segments_hang_nobody() -> None:
    """Slices of one segment skip as many rounds as the others, whichever of them holds the infinity."""
    pretend_two_hosts()
    rank = fd.init().rank
    with segments_of(1024), engine() as it:
        for seed in range(20):
            draw = torch.Generator().manual_seed(seed)
            mine = torch.randn(LARGE, generator=draw)
            for place in torch.randint(0, LARGE, (5,), generator=draw).tolist():
                mine[place] = torch.nan if int(torch.randint(0, 4, (), generator=draw)) == rank else 0.0
            found = run(it, "segments", "allreduce", mine, reduction="average", codec="int8")
            bits = run(it, "bits", "allgather", found.nan_to_num(7.0)[None])
            assert bits.unique(dim=0).shape[0] == 1
            assert found.isnan().any()
            assert found.isfinite().any()


@ranks(4, **TWO_HOSTS)
def test_who_takes_part_decides() -> None:
    """Sets and joined ranks leave hosts with different numbers of ranks: then all exchange with each other."""
    pretend_two_hosts()
    rank = fd.init().rank
    with engine() as it:
        pairs, three = it.add_process_set([0, 1]), it.add_process_set([0, 1, 2])
        seen = circles(it)
        mine = numbers(rank, LARGE, torch.float32)
        if rank < 2:
            assert run(it, "pair", "allreduce", mine, process_set=pairs).equal(sums(torch.float32, LARGE, 2))
        if rank < 3:
            assert run(it, "three", "allreduce", mine, process_set=three).equal(sums(torch.float32, LARGE, 3))
        if rank == 3:
            assert it.join().wait() >= 0
        else:
            assert run(it, "without", "allreduce", mine).equal(sums(torch.float32, LARGE, 3))
            it.join().wait()
        assert seen <= {(0, 1), (0, 1, 2)}


@ranks(4, **TWO_HOSTS)
def test_a_size_that_differs_is_refused_before_bytes_move() -> None:
    pretend_two_hosts()
    rank = fd.init().rank
    with engine() as it:
        seen = circles(it)
        with pytest.raises(Mismatch):
            run(it, "differs", "allreduce", torch.ones(LARGE + (rank == 2)))
        assert not seen
        assert run(it, "differs", "allreduce", torch.ones(LARGE)).eq(4.0).all()


@pytest.mark.parametrize("flat", [True, False])
@ranks(4, FARANDOLE_LOCAL_SIZE="4", FARANDOLE_NODE_COUNT="1")
def test_one_host_and_flat_have_one_group(*, flat: bool) -> None:
    rank = fd.init().rank
    with engine(by_host=not flat) as it:
        seen = circles(it)
        assert run(it, "x", "allreduce", numbers(rank, LARGE, torch.float32)).equal(sums(torch.float32, LARGE, 4))
        assert not it.by_host
        assert seen == {(0, 1, 2, 3)}
