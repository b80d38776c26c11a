"""The ledger of large worlds: the product's own exchanges on torch's process group without peers.

That group answers every collective at once, with whatever is in memory. So what needs values of other ranks does
not run on it: `fd.distribute` itself (ranks agree through the store), proofs of recipes, counts of tokens, and
rows that travel by connections of our own. Of these the layout is compared, and on 2 and 4 real ranks all of it
(tests/ranks/test_ledger.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import farandole as fd
from farandole.comm.engine.bucket import MARKS, DenseBucket
from farandole.comm.engine.buckets import ParamInfo, plan_buckets
from farandole.comm.engine.parameters import RowBlocks, layout_of
from farandole.comm.engine.row_gather import _chunks
from farandole.comm.routes import Route
from farandole.comm.transport.rank_group import RankGroup
from farandole.comm.world.world import World
from farandole.core.cluster import collective_work
from farandole.core.schedule import build_schedule
from farandole.core.vocabulary import events
from farandole.parallel.context.attention import AttentionCall, DividedAttention
from farandole.parallel.context.group import ContextGroup
from farandole.parallel.expert.expert_ranks import ExactRows, ExpertRanks
from farandole.parallel.pipeline.messages import PipelinePeers, StageMailbox, message_of
from farandole.parallel.tensor.regions import (
    TensorRanks,
    begin_region,
    begin_region_of_tokens,
    end_region,
    end_region_by_tokens,
    linear_of,
)
from farandole.parallel.zero.exchange_records import ExchangeRecords
from farandole.plan.candidate import Candidate, CollectiveCalls
from farandole.plan.cost.predict import predict
from farandole.plan.profile import ModelProfile
from tests.unit.plan.cost.cases import cluster_of, transformer

SIZES, FEWER = [2, 64, 1024], [2, 64]
HIDDEN, SEQUENCE, LAYERS = 64, 32, 2


class Alone(NamedTuple):
    """A rank of a large world without the others."""

    here: World
    group: dist.ProcessGroup
    size: int


@pytest.fixture(params=SIZES)
def alone(request: pytest.FixtureRequest) -> Iterator[Alone]:
    here = fd.init()
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None, "the default group"
        yield Alone(here, group, request.param)
    finally:
        dist.destroy_process_group()
        fd.shutdown()


def profile(heads: int = 4) -> ModelProfile:
    return transformer(layers=LAYERS, hidden=HIDDEN, sequence=SEQUENCE, heads=heads)


def calls_of(plan: fd.Plan, ranks: int, *, batch: int, degree: str, heads: int = 4) -> list[CollectiveCalls]:
    found = predict(
        profile(heads), cluster_of(8, ranks), Candidate(plan, ranks, batch), interval=False
    ).collectives
    return [each for each in found if each.degree == degree]


def parameters() -> list[tuple[str, nn.Parameter]]:
    """As the profile has them, in the order in which backward makes their gradients."""
    units = [unit for unit in reversed(profile().units) for _ in range(unit.count)]
    return [
        (
            each.name,
            nn.Parameter(torch.zeros(each.rows, each.columns) if each.columns > 1 else torch.zeros(each.rows)),
        )
        for unit in units
        for each in unit.gradients
    ]


def planned(plan: fd.Plan, *, sharded: bool) -> list[list[nn.Parameter]]:
    named = parameters()
    infos = [
        ParamInfo(i, each.nbytes, each.dtype, each.device, is_sharded=sharded) for i, (_, each) in enumerate(named)
    ]
    made = plan_buckets(infos, first_bytes=plan.first_bucket_bytes, limit_bytes=plan.bucket_bytes)
    return [[named[info.index][1] for info in together] for together in made]


SMALL: dict[str, Any] = {"bucket_bytes": 65536, "first_bucket_bytes": 16384}


def test_buckets_are_summed_as_predicted(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fd.Plan(**SMALL)
    seen: Counter[int] = Counter()
    plain = dist.all_reduce

    def counted(tensor: torch.Tensor, *rest: Any, **keys: Any) -> Any:
        seen[tensor.nbytes] += 1
        return plain(tensor, *rest, **keys)

    monkeypatch.setattr(dist, "all_reduce", counted)
    everyone = RankGroup(tuple(range(alone.size)), 0)
    route = Route("flat", "for a test", alone.group, everyone, RankGroup((0,), 0))
    sent = 0
    for members in planned(plan, sharded=False):
        bucket = DenseBucket([*range(len(members))], members, [layout_of(each) for each in members], alone.size)
        for each in members:
            each.grad = torch.ones_like(each)
        bucket.load(1.0)
        bucket.launch(route).wait()
        sent += bucket.sent_bytes
    calls = calls_of(plan, alone.size, batch=alone.size, degree="data")
    assert seen == {each.nbytes: each.count for each in calls}, f"{alone.size} ranks"
    assert len(seen) > 2, "several kinds of buckets"
    said = sum(each.count * collective_work(each.operation, each.ranks, each.nbytes).sent_bytes for each in calls)
    assert sent == pytest.approx(said, abs=len(parameters())), f"{alone.size} ranks"


@pytest.mark.parametrize("ranks", SIZES)
def test_blocks_of_rows_are_laid_out_as_predicted(ranks: int) -> None:
    plan = fd.Plan(zero=1, **SMALL)
    calls = calls_of(plan, ranks, batch=ranks, degree="shard")
    scattered = Counter(
        4 * RowBlocks(members, range(ranks), tail=len(members) + MARKS).elements
        for members in planned(plan, sharded=True)
    )
    assert scattered == {each.nbytes: each.count for each in calls if each.operation == "reduce_scatter"}, "sums"
    ordered = [each for _, each in reversed(parameters())]
    gathered = Counter(
        4 * RowBlocks(chunk, range(ranks)).elements for chunk in _chunks(ordered, [False] * len(ordered))
    )
    assert gathered == {each.nbytes: each.count for each in calls if each.operation == "all_gather"}, "rows"


class Block(nn.Module):
    """Parameters as those of a layer of the profile."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(each.rows, each.columns) for each in profile().units[1].gradients]
        self.weights = nn.ParameterList([torch.zeros(r, c) if c > 1 else torch.zeros(r) for r, c in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum((each.sum() for each in self.weights), torch.zeros(()))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(128, HIDDEN))
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Parameter(torch.zeros(128, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.embedding.sum()
        for layer in self.layers:
            x = layer(x)
        return x * self.head.sum()


class Watch:
    """Keeps bytes of exchanges."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()

    def record(self, event: events.Event) -> None:
        if isinstance(event, events.Exchange):
            self.sent[event.sent_bytes] += 1


# torch cuts parameters in a time that grows with the ranks: half a minute for 1,024.
@pytest.mark.parametrize("alone", FEWER, indirect=True)
def test_units_of_stage_3_are_gathered_as_predicted(alone: Alone) -> None:
    model: Any = Whole()
    mesh = dist.device_mesh.init_device_mesh("cpu", (alone.size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    alone.here.session.recorder = watch = Watch()
    records = ExchangeRecords(alone.here, fd.Plan(zero=3))
    for state in (
        model._get_fsdp_state()._state_ctx.all_states if model._get_fsdp_state()._lazy_init() is None else ()
    ):
        for group in state._fsdp_param_groups:
            records.watch(group, str)
    model(torch.ones(2, HIDDEN)).sum().backward()
    calls = calls_of(fd.Plan(zero=3), alone.size, batch=alone.size, degree="shard")
    said: Counter[int] = Counter()
    for each in calls:
        if each.operation != "all_reduce":  # the message at the end of a pass is ours, not a unit's
            said[round(collective_work(each.operation, each.ranks, each.nbytes).sent_bytes)] += each.count
    assert watch.sent == said, f"{alone.size} ranks"


def test_sums_of_tensor_parallel_are_as_predicted(alone: Alone) -> None:
    ranks = TensorRanks(alone.here, alone.group, 0, alone.size)
    for by_tokens in (False, True):
        plan = fd.Plan(tensor=alone.size, sequence_parallel=by_tokens)
        begin = begin_region_of_tokens if by_tokens else begin_region
        end = end_region_by_tokens if by_tokens else end_region
        ranks.calls.clear()
        ranks.bytes.clear()
        tokens = max(SEQUENCE, alone.size)
        x = torch.zeros(2, tokens // alone.size if by_tokens else tokens, HIDDEN, requires_grad=True)
        out = x
        for _ in range(2 * LAYERS):
            weight = torch.eye(HIDDEN, requires_grad=True)
            out = end(linear_of(begin(out, ranks, "region"), weight, None), None, ranks, "region")
        out.sum().backward()
        calls = calls_of(plan, alone.size, batch=2, degree="tensor", heads=alone.size)
        for operation in ("all_gather", "reduce_scatter") if by_tokens else ("all_reduce",):
            mine = [each for each in calls if each.operation == operation]
            # Outside of blocks tokens are gathered once more, forward and backward: not in this chain.
            count = sum(each.count for each in mine) - (2 if operation == "all_gather" else 0)
            expected = (6 if operation == "all_gather" else 4) * LAYERS  # again, for the weights' gradients
            assert ranks.calls[operation] == count == expected, f"{operation} on {alone.size} ranks"
            nbytes = {each.nbytes for each in mine}
            assert nbytes == {ranks.bytes[operation] // count * SEQUENCE // tokens}, f"{operation}: one activation"


@pytest.mark.parametrize("alone", FEWER, indirect=True)
def test_hops_and_heads_of_context_parallel_are_as_predicted(alone: Alone) -> None:
    group = ContextGroup(alone.here, alone.group, 0, alone.size, range(alone.size))
    for kind in ("ring", "heads"):
        plan = fd.Plan(context=alone.size, context_kind=kind)
        attention = DividedAttention(group, kind, torch.nn.functional.scaled_dot_product_attention)
        group.traffic.messages = group.traffic.sent_bytes = 0
        tokens = 2 * alone.size
        shape = (2, alone.size, tokens // alone.size, HIDDEN // alone.size)
        query, key, value = (torch.zeros(shape, requires_grad=True) for _ in range(3))
        attention.attend(AttentionCall(query, key, value, is_causal=True)).sum().backward()
        calls = calls_of(plan, alone.size, batch=2, degree="context", heads=alone.size)
        assert LAYERS * group.traffic.messages == sum(each.count for each in calls), kind
        said = sum(
            each.count * collective_work(each.operation, each.ranks, each.nbytes).sent_bytes for each in calls
        )
        assert LAYERS * group.traffic.sent_bytes * SEQUENCE / tokens == pytest.approx(said), kind


def test_tokens_travel_to_experts_as_predicted(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = dist.all_to_all

    def counted(came: list[torch.Tensor], sent: list[torch.Tensor], **keys: Any) -> Any:
        seen.append(sum(each.nbytes for each in sent))
        return plain(came, sent, **keys)

    monkeypatch.setattr(dist, "all_to_all", counted)
    model = transformer(layers=LAYERS, hidden=HIDDEN, sequence=SEQUENCE, experts=alone.size)
    plan = fd.Plan(expert=alone.size)
    found = predict(model, cluster_of(8, alone.size), Candidate(plan, alone.size, alone.size), interval=False)
    calls = [each for each in found.collectives if (each.degree, each.operation) == ("expert", "all_to_all")]
    members = tuple(range(alone.size))
    ranks = ExpertRanks(alone.here, alone.group, alone.group, members, 0, ExactRows())
    rows = SEQUENCE * HIDDEN * 4 // alone.size
    for _ in range(LAYERS):
        for _ in range(4):
            pieces = [torch.zeros(1, rows // 4) for _ in members]
            ranks.swap("layer", pieces, [torch.empty_like(each) for each in pieces])
    assert len(seen) == sum(each.count for each in calls) == 4 * LAYERS, "there and back, twice"
    said = sum(each.count * collective_work(each.operation, each.ranks, each.nbytes).sent_bytes for each in calls)
    assert sum(seen) == pytest.approx(said), f"{alone.size} ranks"


def test_messages_of_pipelines_are_as_predicted(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[int] = Counter()
    plain = dist.isend

    def counted(tensor: torch.Tensor, *rest: Any, **keys: Any) -> Any:
        seen[tensor.nbytes] += 1
        return plain(tensor, *rest, **keys)

    monkeypatch.setattr(dist, "isend", counted)
    stages = min(alone.size, 64)
    model = transformer(layers=2 * stages, hidden=HIDDEN, sequence=SEQUENCE)
    plan = fd.Plan(pipeline=stages, schedule="gpipe", micro_batches=2)
    candidate = Candidate(plan, alone.size, 2 * alone.size // stages)
    found = predict(model, cluster_of(8, alone.size), candidate, interval=False).collectives
    schedule = build_schedule("gpipe", stages, 2)
    one = torch.zeros(1, SEQUENCE, HIDDEN)
    sent = []
    for index in sorted({0, stages // 2, stages - 1}):
        seen.clear()
        peers = PipelinePeers(alone.here, alone.group, index, stages)
        mailbox = StageMailbox(peers, schedule, forward_only=False, buffers=lambda _: [torch.empty_like(one)])
        for action in schedule.actions[index]:
            message = message_of(action, schedule)
            if message is not None:
                mailbox.send(message[0], [one])
        sent.append(dict(seen))
    # The ledger is of the busiest rank, which is one of these kinds.
    calls = [each for each in found if each.degree == "pipeline"]
    assert {each.nbytes: each.count for each in calls} in sent, f"{sent}, {calls}"
