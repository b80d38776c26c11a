"""Who prints, who goes first, and who waits for whom outside the training step."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
import torch

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from tests.ranks.pool import ranks


@ranks(1, 3)
def test_rank_0_prints_and_others_only_with_their_number() -> None:
    world = fd.init()
    here, everyone = io.StringIO(), io.StringIO()
    fd.print("a", 1, sep="-", end="!\n", file=here)
    fd.print("two\nlines", file=everyone, all_ranks=True)
    assert here.getvalue() == ("a-1!\n" if world.rank == 0 else "")
    assert everyone.getvalue() == f"rank {world.rank}: two\nrank {world.rank}: lines\n"
    assert world.is_main == (world.rank == 0)
    fd.shutdown()
    late = io.StringIO()
    fd.print("after the end", file=late)
    assert late.getvalue() == ("after the end\n" if os.environ["FARANDOLE_RANK"] == "0" else "")


def test_alone_without_init_prints_and_main_first_says_what_is_missing() -> None:
    text = io.StringIO()
    fd.print("x", file=text)
    assert text.getvalue() == "x\n"
    with pytest.raises(fd.ConfigError, match=r"call farandole.init\(\) first"), fd.main_first():
        pass
    with pytest.raises(fd.ConfigError, match=r"call farandole.init\(\) first"):
        fd.barrier()


@ranks(1, 2)
def test_a_world_is_one_short_line() -> None:
    world = fd.init()
    backend = "gloo" if world.size > 1 else "no backend"
    shown = f"World(rank {world.rank} of {world.size}, local rank {world.local_rank} of {world.local_size}, "
    assert repr(world) == f"{shown}host {world.host}, cpu, {backend})"
    fd.shutdown()
    assert repr(world).endswith(", closed)")


@ranks(3)
def test_a_barrier_waits_for_the_last() -> None:
    world = fd.init()
    if world.rank == 2:
        time.sleep(0.5)
    came = time.monotonic()
    fd.barrier()
    left = time.monotonic()
    gathered = all_gather_json(world, "test/times", [came, left])
    assert min(left for _, left in gathered) >= max(came for came, _ in gathered)


@pytest.mark.full("slow")
@ranks(3)
def test_a_barrier_names_the_rank_that_does_not_come() -> None:
    world = fd.init(timeout_seconds=2)
    if world.rank == 1:
        time.sleep(3)
        return
    with pytest.raises(fd.Stalled, match="rank 1 did not get here within 2 s"):
        fd.barrier()
    time.sleep(2)


@pytest.mark.gate_cases("1")
@ranks(1, 3)
def test_the_first_rank_goes_first(tmp_path: Path) -> None:
    world = fd.init()
    for i in range(3):
        cache = Path(tmp_path) / f"cache{i}"
        with fd.main_first():
            if not cache.exists():
                assert world.rank == 0
                time.sleep(0.1)
                cache.write_text("made")
        assert cache.read_text() == "made"


@pytest.mark.full("further")
@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_on_every_host_the_first_goes_first(tmp_path: Path) -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    os.environ["FARANDOLE_LOCAL_RANK"], os.environ["FARANDOLE_NODE_RANK"] = str(rank % 2), str(rank // 2)
    world = fd.init()
    cache = Path(tmp_path) / f"cache of host {world.node_rank}"
    with fd.main_first(local=True):
        if not cache.exists():
            assert world.local_rank == 0
            time.sleep(0.2 * world.node_rank)
            cache.write_text("made")
    assert cache.exists()


@ranks(3)
def test_what_fails_on_the_first_rank_reaches_the_others_by_name() -> None:
    world = fd.init()
    ran = False
    kind = OSError if world.rank == 0 else fd.PeerLost
    with pytest.raises(kind, match="no space left") as caught, fd.main_first():  # noqa: PT012
        ran = True
        raise OSError("no space left")
    assert ran == (world.rank == 0)
    if world.rank:
        assert "rank 0, which went first, failed in it: OSError: no space left" in str(caught.value)
    fd.barrier()  # the world is whole, and the next turn works
    with fd.main_first():
        pass


@ranks(2)
def test_an_exit_in_the_first_turn_does_not_leave_the_others_waiting() -> None:
    world = fd.init()
    with pytest.raises(SystemExit if world.rank == 0 else fd.PeerLost), fd.main_first():
        raise SystemExit(3)


@pytest.mark.full("further")
@ranks(2)
def test_a_long_first_turn_ends_in_an_error_with_the_remedy() -> None:
    world = fd.init()
    if world.rank:
        with (
            pytest.raises(fd.Stalled, match=r"rank 0 did not finish its turn within 0.3 s.*timeout_seconds"),
            fd.main_first(timeout_seconds=0.3),
        ):
            pass
    else:
        with fd.main_first(timeout_seconds=0.3):
            time.sleep(1)
    value = torch.ones(1)
    assert fd.mean(value) == 1


@ranks(2)
def test_ranks_that_disagree_and_wrong_arguments_are_refused() -> None:
    world = fd.init()
    with (
        pytest.raises(fd.Mismatch, match=r"local is .*true on rank 1|local is .*false on rank 0"),
        fd.main_first(local=world.rank == 1),
    ):
        pass
    with pytest.raises(fd.ConfigError, match="timeout_seconds is 0"), fd.main_first(timeout_seconds=0):
        pass
