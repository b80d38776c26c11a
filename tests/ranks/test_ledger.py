"""The planner's ledger: numbers and bytes of collectives are those that a step of real ranks sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import farandole as fd
from farandole.comm.engine.row_exchange import BlockMemory, Region, RowExchange
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.cluster import collective_work
from farandole.core.vocabulary import events
from farandole.parallel.context.context import Context
from farandole.parallel.model import DistributedModel
from farandole.plan.candidate import Candidate, CollectiveCalls
from farandole.plan.cost.predict import predict
from farandole.plan.profile import ModelProfile, profile_from_mapping, profile_to_mapping
from farandole.train.analysis.analyse import analyse
from tests.ranks.pool import ranks, takes
from tests.ranks.tensor_models import NAMED, TOKENS, WIDTH, WORDS, Block, Language
from tests.unit.plan.cost.cases import cluster_of

pytestmark = pytest.mark.full("slow")

SMALL: dict[str, Any] = {"bucket_bytes": 16384, "first_bucket_bytes": 4096}


def profile_of(make: Callable[[], nn.Module], make_batch: Callable[[int], Any]) -> ModelProfile:
    """The profile as rank 0 makes it."""
    here = fd.world()
    mine = profile_to_mapping(analyse(make, make_batch, optimizer="adamw")) if here.rank == 0 else {}
    return profile_from_mapping(all_gather_json(here, "test/profile", mine)[0])


def tokens_of(samples: int) -> torch.Tensor:
    return torch.zeros(samples, TOKENS, dtype=torch.int64)


def ledger(profile: ModelProfile, plan: fd.Plan, batch: int) -> tuple[CollectiveCalls, ...]:
    size = fd.world().size
    return predict(profile, cluster_of(size), Candidate(plan, size, batch), interval=False).collectives


def expected(calls: tuple[CollectiveCalls, ...], *operations: str) -> Counter[tuple[str, int]]:
    """The ledger's tensors: operation and bytes."""
    found: Counter[tuple[str, int]] = Counter()
    for each in calls:
        if each.operation in operations:
            found[each.operation, each.nbytes] += each.count
    return found


class Log:
    """What ranks send: events of exchanges, blocks of rows, and calls of torch.distributed."""

    def __init__(self) -> None:
        self.exchanges: list[events.Exchange] = []
        self.seen: Counter[tuple[str, int]] = Counter()

    def record(self, event: events.Event) -> None:
        if isinstance(event, events.Exchange):
            self.exchanges.append(event)

    @contextmanager
    def open(self) -> Iterator[None]:
        session = fd.world().session
        before, session.recorder = session.recorder, self
        with pytest.MonkeyPatch.context() as patch:
            for name, operation, whole in (
                ("isend", "send", lambda tensor, *_, **__: tensor.nbytes),
                ("all_to_all", "all_to_all", lambda came, sent, *_, **__: sum(each.nbytes for each in sent)),
            ):
                patch.setattr(dist, name, self._counted(getattr(dist, name), operation, whole))
            scatter, gather = RowExchange.reduce_scatter, RowExchange.all_gather

            def scattered(rows: RowExchange, region: Region, lent: BlockMemory, *rest: Any, **keys: Any) -> Any:
                self.seen["reduce_scatter", lent.flat.nbytes] += 1
                return scatter(rows, region, lent, *rest, **keys)

            def gathered(rows: RowExchange, elements: int, dtype: torch.dtype, *rest: Any, **keys: Any) -> Any:
                self.seen["all_gather", elements * len(rows.owners) * dtype.itemsize] += 1
                return gather(rows, elements, dtype, *rest, **keys)

            patch.setattr(RowExchange, "reduce_scatter", scattered)
            patch.setattr(RowExchange, "all_gather", gathered)
            try:
                yield
            finally:
                session.recorder = before

    def _counted(self, plain: Any, operation: str, whole: Any) -> Any:
        def call(*arguments: Any, **keys: Any) -> Any:
            self.seen[operation, whole(*arguments, **keys)] += 1
            return plain(*arguments, **keys)

        return call

    def buckets(self) -> Counter[tuple[str, int]]:
        return Counter(("all_reduce", bucket.nbytes) for each in self.exchanges for bucket in each.buckets)


def trained(
    plan: fd.Plan, make: Callable[[], nn.Module], step: Callable[[nn.Module], Any]
) -> tuple[Log, nn.Module]:
    """Train for two steps, and log the third; `step`: passes over a batch."""
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    fd.distribute(model, optimizer, plan)
    torch.manual_seed(fd.world().sample_rank)
    for _ in range(3):
        log = Log()
        with log.open():
            step(model)
            optimizer.step()
            optimizer.zero_grad()
    return log, model


def language_step(model: nn.Module, passes: int = 1) -> None:
    for _ in range(passes):
        tokens = torch.randint(0, WORDS, (2, TOKENS))
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


@ranks(4)
@takes(120)
def test_gradients_and_shards_are_those_of_the_ledger() -> None:
    size = fd.init().size
    profile = profile_of(Language, tokens_of)
    for keys, passes in (
        ({}, 1), ({"accumulate": 2}, 2), ({"codec": "int8"}, 1), ({"zero": 1}, 1),
        ({"zero": 2, "accumulate": 2}, 2),
    ):  # fmt: skip
        plan = fd.Plan(**SMALL, **keys)
        calls = ledger(profile, plan, 2 * size * passes)
        log, _ = trained(plan, Language, partial(language_step, passes=passes))
        if "zero" not in keys:
            assert log.buckets() == expected(calls, "all_reduce"), f"{keys}"
            assert len(log.buckets()) > 2, f"{keys}: one bucket shows little"
            if "codec" not in keys:
                sent = sum(each.sent_bytes for each in log.exchanges)
                assert sent == pytest.approx(sent_by(calls), abs=sum(each.count for each in calls)), f"{keys}"
            continue
        assert log.seen == expected(calls, "reduce_scatter", "all_gather"), f"{keys}"
    for plan in (fd.Plan(zero=3), fd.Plan(zero=3, precision="bf16")):
        calls = ledger(profile, plan, 2 * size)
        log, _ = trained(plan, Language, language_step)
        sizes = Counter(each.sent_bytes for each in log.exchanges)
        said: Counter[int] = Counter()
        for each in calls:
            said[int(collective_work(each.operation, size, each.nbytes).sent_bytes)] += each.count
        assert sizes == said, f"stage 3, {plan.precision}: {sizes}, and {said} of {calls}"


class Stack(nn.Module):
    """Blocks alone: what they exchange is that of layers."""

    layers = 4

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(self.layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Deep(Stack):
    """Two layers for each stage of the longest pipeline here."""

    layers = 8


def stack_step(model: nn.Module) -> None:
    # The input takes a gradient, as that of blocks behind an embedding does.
    model(torch.randn(2, TOKENS, WIDTH, requires_grad=True)).square().sum().backward()


def floats_of(samples: int) -> torch.Tensor:
    return torch.zeros(samples, TOKENS, WIDTH, requires_grad=True)


@ranks(4)
@takes(120)
def test_activations_are_those_of_the_ledger() -> None:
    fd.init()
    profile = with_recipe(profile_of(Stack, floats_of))
    check_tensor(profile)
    check_pipeline(profile_of(Deep, floats_of))
    check_expert()
    for kind in ("ring", "heads"):
        check_context(profile, kind)
        fd.shutdown()
        fd.init()


def with_recipe(profile: ModelProfile) -> ModelProfile:
    """The profile with what the plan's recipe says beside what is recognised."""
    units = []
    for unit in profile.units:
        if unit.tensor is None:
            assert not unit.gradients, f"{unit.name}: its pair of layers is recognised"
            units.append(unit)
            continue
        parts = [
            replace(each, divided_by="tensor")
            if "norm" not in each.name and not each.name.endswith(("o_proj.bias", "mlp.3.bias"))
            else each
            for each in unit.gradients
        ]
        units.append(replace(
            unit, gradients=tuple(parts), tensor=replace(unit.tensor, forward_sums=2, backward_sums=2),
        ))  # fmt: skip
    return replace(profile, units=tuple(units))


def check_tensor(profile: ModelProfile) -> None:
    size = fd.world().size
    for by_tokens in (False, True):
        for recompute in ("none", "blocks"):
            plan = fd.Plan(tensor=size, tensor_recipe=NAMED, sequence_parallel=by_tokens, recompute=recompute)
            said, nbytes = Counter[str](), Counter[str]()
            for each in ledger(profile, plan, 2):
                if each.degree == "tensor":
                    said[each.operation] += each.count
                    nbytes[each.operation] += each.count * each.nbytes
            torch.manual_seed(1)
            model = Stack()
            fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan)
            stack_step(model)
            proofs = DistributedModel.of(model).proofs
            assert proofs is not None, "no proofs"
            proofs.ranks.calls.clear()
            proofs.ranks.bytes.clear()
            stack_step(model)
            what = f"by tokens {by_tokens}, recompute {recompute}"
            assert proofs.ranks.calls == said, what
            assert proofs.ranks.bytes == nbytes, what


def check_context(profile: ModelProfile, kind: Literal["ring", "heads"]) -> None:
    size = fd.world().size
    plan = fd.Plan(context=size, context_kind=kind)
    calls = [each for each in ledger(profile, plan, 2) if each.degree == "context"]
    torch.manual_seed(1)
    model = Stack()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    context = fd.world().session.kept(Context)
    assert context is not None, "no attention is divided"
    traffic = context.group.traffic
    for _ in range(2):
        traffic.messages = traffic.sent_bytes = 0
        x: Any = fd.context_shard(torch.randn(2, TOKENS, WIDTH))
        model(x.requires_grad_()).square().sum().backward()
    assert traffic.messages == sum(each.count for each in calls), kind
    assert traffic.sent_bytes == sent_by(calls), kind


def sent_by(calls: Iterable[CollectiveCalls]) -> float:
    return sum(each.count * collective_work(each.operation, each.ranks, each.nbytes).sent_bytes for each in calls)


def check_pipeline(profile: ModelProfile) -> None:
    size = fd.world().size
    for schedule in ("1f1b", "zb-v"):
        plan = fd.Plan(pipeline=size, schedule=schedule, micro_batches=2 * size)
        calls = [each for each in ledger(profile, plan, 4 * size) if each.degree == "pipeline"]

        def step(model: nn.Module) -> None:
            torch.manual_seed(1)
            x = torch.randn(4 * fd.world().size, TOKENS, WIDTH)
            fd.step(model, functional.mse_loss, x, x)

        log, _ = trained(plan, Deep, step)
        mine = sum(log.seen.values())
        everyones = all_gather_json(fd.world(), "test/messages", mine)
        assert {nbytes for _, nbytes in log.seen} <= {each.nbytes for each in calls}, f"{schedule}: {log.seen}"
        assert sum(each.count for each in calls) in everyones, f"{schedule}: {everyones}, {calls}"


class Experts(nn.Module):
    """Every token goes to every expert: the load is even."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = fd.MixtureOfExperts(WIDTH, 16, num_experts=4, top_k=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.inner(x)
        return x + mixed


def check_expert() -> None:
    size = fd.world().size
    plan = fd.Plan(expert=size)
    calls = [
        each for each in ledger(profile_of(Experts, floats_of), plan, 2 * size)
        if (each.degree, each.operation) == ("expert", "all_to_all")
    ]  # fmt: skip
    log, _ = trained(plan, Experts, stack_step)
    assert sum(log.seen.values()) == sum(each.count for each in calls) == 4, f"{log.seen}, {calls}"
    # The log has what leaves a rank: not the rows for its own experts.
    assert sum(nbytes * count for (_, nbytes), count in log.seen.items()) == sent_by(calls), f"{log.seen}, {calls}"
