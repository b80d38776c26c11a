"""`TorchState` and `ElasticSampler` on real ranks."""

from __future__ import annotations

import torch

from tests.ranks.pool import ranks


@ranks(3)
def test_sync_takes_everything_from_rank_0() -> None:
    import farandole.horovod.torch as hvd
    from farandole.horovod.torch.elastic import ElasticSampler, TorchState

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1), momentum=0.9)
    if hvd.rank() != 1:  # rank 1 has just joined: its optimizer has no state
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    sampler = ElasticSampler(range(20), shuffle=False)
    sampler.record_batch(0, hvd.rank() + 1)
    state = TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=hvd.rank() + 7)
    state.sync()
    mine = (
        [p.tolist() for p in model.parameters()],
        [each["momentum_buffer"].tolist() for each in optimizer.state_dict()["state"].values()],
        optimizer.param_groups[0]["lr"],
        sampler.state_dict(),
        state.batch,  # type: ignore[attr-defined]
    )
    assert hvd.allgather_object(mine) == [mine] * 3
    assert mine[2:] == (0.1, {"epoch": 0, "processed_num": 3}, 7)
    assert sampler.remaining_indices == list(range(3, 20))
    with torch.no_grad():
        model.weight.zero_()
    state.restore()
    assert model.weight.tolist() == mine[0][0], "what was received is kept"
    hvd.shutdown()


@ranks(3)
def test_every_sample_is_taken_once_though_the_ranks_change() -> None:
    import farandole.horovod.torch as hvd
    from farandole.horovod.torch.elastic import ElasticSampler

    hvd.init()
    sampler = ElasticSampler(range(32), seed=3)
    assert len(sampler) == 11
    first = list(sampler)[:4]
    sampler.record_batch(0, 4)
    taken = sorted(index for part in hvd.allgather_object(first) for index in part)
    assert len(set(taken)) == 12
    # Two ranks go on: as `reset` finds them, with the places that two ranks would have.
    sampler.reset()
    rest = sampler.remaining_indices
    assert sorted([*taken, *rest]) == list(range(32))
    parts = hvd.allgather_object(list(sampler))
    padded = [index for row in zip(*parts, strict=True) for index in row]
    assert padded[: len(rest)] == rest
    assert padded[len(rest) :] == rest[: len(padded) - len(rest)]
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    assert sorted(sampler.remaining_indices) == list(range(32))
    assert sampler.remaining_indices != ElasticSampler(range(32), seed=3).remaining_indices
    sampler.load_state_dict({"epoch": 0, "processed_num": 31})
    assert len(list(sampler)) == len(sampler) == 1, "one sample is left, and each rank takes it"
    sampler.load_state_dict({"epoch": 0, "processed_num": 40})
    assert list(sampler) == []
    hvd.shutdown()
