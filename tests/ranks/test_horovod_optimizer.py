"""`hvd.DistributedOptimizer` on several ranks: the same training as one process, by every path."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import farandole.horovod.torch as hvd
from farandole.horovod.torch.compression import NoneCompressor
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp, own, train_alone

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
}


class _Halves(NoneCompressor):
    """Somebody's own compression: half of the values travels, doubled on arrival."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor / 2, "half"

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        assert ctx == "half"
        return tensor * 2


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, **keywords: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **keywords)


def train(model: nn.Module, optimizer: Any, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()


@pytest.mark.full("further")
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@ranks(3)
def test_training_equals_one_process(kind: str) -> None:
    hvd.init()
    model, reference = mlp(seed=hvd.rank()), mlp(seed=0)
    optimizer = wrap(model, MAKE[kind](model.parameters()))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer._farandole_path == "reducer", optimizer._farandole_path_reason
    batches = [data(12, seed) for seed in range(5)]
    train(model, optimizer, batches)
    train_alone(reference, MAKE[kind](reference.parameters()), batches)
    assert_close(model, reference)
    assert_same_bits(model)


def _ways(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    first, *rest = list(model.parameters())
    return {
        "own compression": ({"compression": _Halves}, "tensor"),
        "two groups": ({"groups": 2}, "tensor"),
        "lists": ({"groups": [[first, rest[0]], rest[1:3]]}, "tensor"),
        "lists and predivide": ({"groups": [rest], "gradient_predivide_factor": 2.0}, "tensor"),
        "predivide": ({"gradient_predivide_factor": 2.0}, "reducer"),
        "sum": ({"op": hvd.Sum}, "reducer"),
        "sum by tensors": ({"op": hvd.Sum, "groups": 1}, "tensor"),
        "maximum": ({"op": hvd.Max}, "tensor"),
    }


@pytest.mark.gate_cases("lists")
@pytest.mark.parametrize("way", list(_ways(mlp())))
@ranks(2)
def test_every_argument_gives_the_gradient_it_promises(way: str) -> None:
    hvd.init()
    model, mirror = mlp(), mlp()
    keywords, path = _ways(model)[way]
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1), **keywords)
    assert optimizer._farandole_path == path, optimizer._farandole_path_reason
    for seed in range(3):
        x, y = data(8, seed)
        each = []
        for rank in range(2):
            mirror.zero_grad()
            nn.functional.mse_loss(mirror(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()
            each.append([p.grad.clone() for p in mirror.parameters() if p.grad is not None])
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.synchronize()
        for mine, a, b in zip(model.parameters(), *each, strict=True):
            expected = torch.maximum(a, b) if "maximum" in way else (a + b) / (1 if "sum" in way else 2)
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, expected)
        with optimizer.skip_synchronize():
            optimizer.step()
        mirror.load_state_dict(model.state_dict())
    assert_same_bits(model)


@pytest.mark.gate_cases("topk")
@pytest.mark.parametrize(
    "compression",
    ["fp16", "bf16", "int8", "topk", "powersgd"],
)
@ranks(2)
def test_compression_trains_and_stays_the_same_on_all_ranks(compression: str) -> None:
    hvd.init()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 3))
    reference = copy.deepcopy(model)
    chosen = {"topk": hvd.Compression.topk(0.1), "powersgd": hvd.Compression.powersgd(2)}
    wanted = chosen.get(compression) or getattr(hvd.Compression, compression)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.05), compression=wanted)
    assert optimizer._farandole_path == "reducer", optimizer._farandole_path_reason
    batches = [data(16, 1)] * 20
    train(model, optimizer, batches)
    assert_same_bits(model)
    train_alone(reference, torch.optim.SGD(reference.parameters(), 0.05), batches)
    x, y = batches[0]
    mine, theirs = (float(nn.functional.mse_loss(m(x), y).detach()) for m in (model, reference))
    assert abs(mine - theirs) < 0.05 * theirs, (mine, theirs)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert not same, "nothing was lost: was it compressed?"
    small = nn.Linear(2, 2)  # too small for any codec, which is no mistake
    train_it = wrap(small, torch.optim.SGD(small.parameters(), 0.1), compression=wanted)
    small(torch.ones(1, 2)).sum().backward()
    train_it.step()
    assert_same_bits(small)


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(6, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        chosen: Any = self.heads[head]
        result: torch.Tensor = chosen(self.trunk(x))
        return result


@pytest.mark.parametrize("groups", [None, 2])
@ranks(2)
def test_ranks_may_use_different_parameters(groups: int | None) -> None:
    hvd.init()
    model, reference = _Heads(), _Heads()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), groups=groups)
    other = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    x, y = data(8)
    for step in range(4):
        optimizer.zero_grad()
        other.zero_grad()
        # Step 2: nothing of the model is used on rank 1; the others: a head of its own on every rank.
        heads = [(step + rank) % 2 for rank in range(2)]
        alone = [0] if step == 2 else [0, 1]
        if hvd.rank() in alone:
            nn.functional.mse_loss(model(own(x), heads[hvd.rank()]), own(y)).backward()
        for rank in alone:
            part = nn.functional.mse_loss(reference(x.chunk(2)[rank], heads[rank]), y.chunk(2)[rank])
            (part / 2).backward()
        optimizer.step()
        for parameter in reference.parameters():  # Horovod: unused parameters have zeros
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        other.step()
        unused = list(model.heads.parameters())[-1].grad
        assert unused is not None
        assert not unused.any()
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_parameters_are_matched_by_name_whatever_their_order() -> None:
    hvd.init()
    model, reference = mlp(), mlp()
    named = list(model.named_parameters())
    if hvd.rank():
        named.reverse()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], 0.1), named_parameters=iter(named))
    batches = [data(8, seed) for seed in range(3)]
    train(model, optimizer, batches)
    train_alone(reference, torch.optim.SGD(reference.parameters(), 0.1), batches)
    assert_close(model, reference)


@ranks(2)
def test_two_networks_take_turns_with_gradients_on_and_off() -> None:
    hvd.init()
    torch.manual_seed(0)
    maker, judge = nn.Linear(6, 6), nn.Linear(6, 3)
    nets = {"maker": maker, "judge": judge}
    optimizers = {name: wrap(net, torch.optim.SGD(net.parameters(), 0.1)) for name, net in nets.items()}
    mirrors = copy.deepcopy(nets)
    x, y = data(8)
    for step in range(6):
        turn = ["maker", "judge"][step % 2]
        for name, net in nets.items():
            net.requires_grad_(name == turn)
            mirrors[name].requires_grad_(name == turn)
            optimizers[name].zero_grad()
            mirrors[name].zero_grad()
        nn.functional.mse_loss(judge(maker(own(x))), own(y)).backward()
        nn.functional.mse_loss(mirrors["judge"](mirrors["maker"](x)), y).backward()
        optimizers[turn].step()
        torch.optim.SGD(mirrors[turn].parameters(), 0.1).step()
    for name, net in nets.items():
        assert_close(net, mirrors[name])
        assert_same_bits(net)


@pytest.mark.parametrize("groups", [None, 1])
@ranks(2)
def test_passes_are_added_up_and_not_divided(groups: int | None) -> None:
    hvd.init()
    model, reference = mlp(), mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.05), backward_passes_per_step=2, groups=groups)
    other = torch.optim.SGD(reference.parameters(), 0.05)
    seeds = iter(range(100))

    def passes(count: int) -> None:
        for _ in range(count):
            x, y = data(8, next(seeds))
            nn.functional.mse_loss(model(own(x)), own(y)).backward()
            nn.functional.mse_loss(reference(x), y).backward()

    for count in (2, 2, 1):  # the last step comes early
        optimizer.zero_grad()
        other.zero_grad()
        passes(count)
        optimizer.step()
        other.step()
    optimizer.set_backward_passes_per_step(3)
    optimizer.zero_grad()
    other.zero_grad()
    passes(3)
    optimizer.step()
    other.step()
    assert_close(model, reference)
    assert_same_bits(model)
    optimizer.zero_grad()
    passes(3)
    with pytest.raises(AssertionError, match="Gradients were computed more than backward_passes_per_step times"):
        nn.functional.mse_loss(model(torch.ones(1, 6)), torch.ones(1, 3)).backward()


@pytest.mark.parametrize("groups", [None, 1])
@ranks(2)
def test_mistakes_in_the_order_of_calls(groups: int | None) -> None:
    hvd.init()
    model = mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1), groups=groups)
    x, y = data(8)

    def backward() -> None:
        nn.functional.mse_loss(model(own(x)), own(y)).backward()

    backward()
    assert optimizer._handles
    for call in (optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False)):
        with pytest.raises(AssertionError, match=r"optimizer.zero_grad\(\) was called after loss.backward\(\)"):
            call()
    with pytest.raises(AssertionError, match="Gradients were computed more than"):
        backward()
    optimizer.synchronize()  # what the mistake left in the gradients is to be zeroed
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    backward()
    optimizer.synchronize()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize") as seen:
        optimizer.step()
    assert len(seen) == 1
    after = [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if b is not None)
    optimizer.zero_grad()
    backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()  # nothing is pending any more
    backward()
    optimizer.step()
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_two_losses_for_different_parameters_of_one_step() -> None:
    hvd.init()
    model, reference = _Heads(), _Heads()
    optimizer = wrap(model, torch.optim.SGD(model.heads.parameters(), 0.1))
    other = torch.optim.SGD(reference.heads.parameters(), 0.1)
    x, y = data(8)
    for net, part in ((model, own), (reference, lambda t: t)):
        net.trunk.requires_grad_(False)
        for head in range(2):
            nn.functional.mse_loss(net(part(x), head), part(y)).backward()
    optimizer.step()
    other.step()
    assert_close(model, reference)


@pytest.mark.gate_cases("reducer-False")
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("path", ["reducer", "tensor"])
@ranks(2)
def test_sparse_embeddings(path: str, dense: bool) -> None:
    hvd.init()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    reference = copy.deepcopy(model)
    compression = _Halves if path == "tensor" else hvd.Compression.none
    optimizer = wrap(
        model, torch.optim.SGD(model.parameters(), 0.1), sparse_as_dense=dense, compression=compression
    )
    assert optimizer._farandole_path == path
    other = torch.optim.SGD(reference.parameters(), 0.1)
    tokens, (_, y) = torch.randint(0, 20, (8, 2)), data(8)
    for _ in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        nn.functional.mse_loss(model(own(tokens)), own(y)).backward()
        nn.functional.mse_loss(reference(tokens), y).backward()
        optimizer.synchronize()
        grad = model[0].weight.grad
        assert isinstance(grad, torch.Tensor)
        assert grad.is_sparse
        with optimizer.skip_synchronize():
            optimizer.step()
        other.step()
    assert_close(model, reference)


@pytest.mark.gate_cases("reducer")
@pytest.mark.parametrize("path", ["reducer", "group", "named"])
@ranks(2)
def test_an_optimizer_of_sparse_gradients_that_travel_as_dense_ones(path: str) -> None:
    hvd.init()
    torch.manual_seed(2)
    model = nn.Embedding(10, 3, sparse=True)
    reference = copy.deepcopy(model)
    keywords: dict[str, Any] = {"reducer": {}, "group": {"groups": 1}, "named": {"compression": _Halves}}
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(list(model.parameters()), lr=0.1), sparse_as_dense=True, **keywords[path]
    )
    other = torch.optim.SparseAdam(list(reference.parameters()), lr=0.1)
    for rows in ([[1, 2], [2, 3]], [[4], []], [[5, 5], [6, 6]]):  # in the second step rank 1 touches nothing
        optimizer.zero_grad()
        other.zero_grad()
        if rows[hvd.rank()]:
            model(torch.tensor(rows[hvd.rank()])).sum().backward()
        reference(torch.tensor([row for own_rows in rows for row in own_rows])).sum().div(2).backward()
        optimizer.step()
        assert model.weight.grad is not None
        assert model.weight.grad.is_sparse
        other.step()
        assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.parametrize("path", ["reducer", "tensor"])
@ranks(2)
def test_what_horovods_optimizer_shows(path: str) -> None:
    hvd.init()
    model = mlp()
    groups = None if path == "reducer" else [[model[0].weight, model[0].bias]]
    optimizer = wrap(
        model, torch.optim.SGD(model.parameters(), 0.1), backward_passes_per_step=2, groups=groups,
        compression=hvd.Compression.fp16, sparse_as_dense=True,
    )  # fmt: skip
    assert optimizer._farandole_path == path
    assert optimizer.find_duplicates(["a", "b", "a"]) == {"a"}
    assert optimizer.sparse_as_dense
    assert optimizer._compression is hvd.Compression.fp16
    assert (optimizer._groups is None) == (groups is None)
    assert groups is None or [[id(p) for p in group] for group in optimizer._groups] == [
        [id(p) for p in groups[0]]
    ]
    assert optimizer._grad_accs == []
    optimizer._register_hooks()
    x, y = data(8)
    delays = []
    for _ in range(2):
        delays.append(optimizer._allreduce_delay[model[0].weight])
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
    delays.append(optimizer._allreduce_delay[model[0].weight])
    assert delays == [2, 1, 0]
    optimizer.step()
    assert optimizer._allreduce_delay[model[0].weight] == 2
    model[0].weight.grad = torch.full((16, 6), 1.0 + hvd.rank())
    handle, context = optimizer._allreduce_grad_async(model[0].weight)
    assert optimizer._compression.decompress(hvd.synchronize(handle), context).unique().tolist() == [1.5]
    other = copy.deepcopy(optimizer)
    assert type(other) is type(optimizer)
    assert pickle.loads(pickle.dumps(optimizer)).sparse_as_dense


@ranks(3)
def test_a_process_set_has_its_own_gradients() -> None:
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    model, reference = mlp(), mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1), process_set=pair)
    x, y = data(8)
    place = [0, 2].index(hvd.rank()) if pair.included() else 0
    assert optimizer._farandole_path == ("tensor" if pair.included() else "alone")
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.chunk(2)[place]), y.chunk(2)[place]).backward()
        optimizer.step()
    if not pair.included():
        x, y = x.chunk(2)[0], y.chunk(2)[0]
    train_alone(reference, torch.optim.SGD(reference.parameters(), 0.1), [(x, y)] * 3)
    assert_close(model, reference)


@pytest.mark.full("further")
@ranks(2)
def test_parameters_added_later_meet_too() -> None:
    hvd.init()
    model, reference = _Heads(), _Heads()
    optimizer = wrap(model, torch.optim.SGD(model.trunk.parameters(), 0.1))
    other = torch.optim.SGD(reference.trunk.parameters(), 0.1)
    x, y = data(8)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(model.heads.parameters()), "lr": 0.2})
            other.add_param_group({"params": list(reference.heads.parameters()), "lr": 0.2})
        for net, o, part in ((model, optimizer, own), (reference, other, lambda t: t)):
            net.zero_grad()
            nn.functional.mse_loss(net(part(x), 0), part(y)).backward()
            o.step()
    assert not torch.equal(*[next(net.heads.parameters()) for net in (model, _Heads())])
    assert_close(model, reference)
    assert_same_bits(model)


@ranks(2)
def test_a_parameter_thawed_later_meets_too() -> None:
    hvd.init()
    model, reference = _Heads(), _Heads()
    for net in (model, reference):
        net.trunk.requires_grad_(False)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1))
    other = torch.optim.SGD(reference.parameters(), 0.1)
    x, y = data(8)
    for step in range(4):
        for net, o, part in ((model, optimizer, own), (reference, other, lambda t: t)):
            net.trunk.requires_grad_(step >= 2)
            o.zero_grad()
            nn.functional.mse_loss(net(part(x), 0), part(y)).backward()
            o.step()
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.gate_cases("None-True")
@pytest.mark.parametrize("ceremony", [True, False])
@pytest.mark.parametrize("groups", [None, 1])
@ranks(2)
def test_a_gradient_scaler(ceremony: bool, groups: int | None) -> None:
    hvd.init()
    model, reference = mlp(), mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1), groups=groups)
    other = torch.optim.SGD(reference.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)  # the first steps overflow
    if groups and not ceremony:
        return  # gradients of the tensor path are each rank's own until synchronize, as Horovod's are
    steps = 0
    for seed in range(140):
        x, y = data(8, seed % 5)
        optimizer.zero_grad()
        scaler.scale(8 * nn.functional.mse_loss(model(own(x)), own(y))).backward()
        scale = scaler.get_scale()
        if ceremony:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() == scale:
            other.zero_grad()
            (8 * nn.functional.mse_loss(reference(x), y)).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            other.step()
            steps += 1
        if steps == 3:
            break
    assert steps == 3
    assert seed >= 3, "no step was skipped"
    assert_close(model, reference, rtol=1e-4)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_a_closure_computes_the_gradients_of_all_ranks() -> None:
    hvd.init()
    model, reference = mlp(), mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1))
    x, y = data(8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(own(x)), own(y))
        loss.backward()
        return loss

    for _ in range(3):
        loss = optimizer.step(closure)
        assert loss.detach() > 0
    train_alone(reference, torch.optim.SGD(reference.parameters(), 0.1), [(x, y)] * 3)
    assert_close(model, reference)


@pytest.mark.full("further")
@ranks(2)
def test_schedulers_checkpoints_and_copies() -> None:
    hvd.init()
    model, reference = mlp(), mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    kind: type = type(optimizer)
    assert issubclass(kind, torch.optim.SGD)
    assert kind.__name__ == "SGD"
    other = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, other)]
    x, y = data(8)

    def both(mine: nn.Module, my_optimizer: Any) -> None:
        train(mine, my_optimizer, [(x, y)])
        train_alone(reference, other, [(x, y)])

    both(model, optimizer)
    for scheduler in schedulers:
        scheduler.step()
    both(model, optimizer)
    assert_close(model, reference)
    clone_model, clone = copy.deepcopy((model, optimizer))
    assert clone.param_groups[0]["params"][0] is next(iter(clone_model.parameters()))
    both(clone_model, clone)
    both(clone_model, clone)
    assert clone._farandole_path == "reducer"
    assert_close(clone_model, reference)
    assert_same_bits(clone_model)


@pytest.mark.full("further")
@pytest.mark.parametrize("path", ["reducer", "tensor"])
@ranks(3)
def test_ranks_with_less_data_join(path: str) -> None:
    hvd.init()
    model, reference = mlp(), mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1), groups=None if path == "reducer" else 1)
    other = torch.optim.SGD(reference.parameters(), 0.1)
    counts = [1, 4, 2]
    for _ in range(2):
        for step in range(counts[hvd.rank()]):
            x, y = data(12, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(own(x)), own(y)).backward()
            optimizer.step()
            hvd.allreduce(torch.ones(2), name="metric")
        last = hvd.join()
        assert last == 1, last
        for step in range(max(counts)):
            x, y = data(12, step)
            other.zero_grad()
            for rank in range(3):
                if step < counts[rank]:
                    (nn.functional.mse_loss(reference(x.chunk(3)[rank]), y.chunk(3)[rank]) / 3).backward()
            other.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        assert_close(model, reference)
        assert_same_bits(model)
    assert not torch.equal(model[0].weight, mlp()[0].weight)  # type: ignore[arg-type]


@pytest.mark.full("further")
@ranks(2)
def test_a_rank_joins_before_its_first_step_and_with_two_optimizers() -> None:
    hvd.init()
    nets = [nn.Linear(6, 3), nn.Linear(6, 3)]
    optimizers = [wrap(net, torch.optim.SGD(net.parameters(), 0.1)) for net in nets]
    x, y = data(8)

    def step(which: int) -> None:
        optimizers[which].zero_grad()
        nn.functional.mse_loss(nets[which](own(x)), own(y)).backward()
        optimizers[which].step()

    step(0)
    if hvd.rank() == 0:
        for which in (1, 0, 0, 1, 1):
            step(which)
    hvd.join()
    step(0)
    step(1)


@pytest.mark.full("further")
@ranks(2)
def test_adasum_combines_what_the_steps_changed() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum)
    assert optimizer._farandole_path == "adasum"
    for step in range(3):
        start = model.weight.detach().clone()
        x = [data(8, 10 * step + rank, width=4)[0] for rank in range(2)]
        changes = []
        for part in x:
            (grad,) = torch.autograd.grad(model(part).square().mean(), model.weight)
            changes.append(-0.1 * grad)
        a, b = changes
        dot, aa, bb = (a * b).sum(), a.square().sum(), b.square().sum()
        expected = start + (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b
        optimizer.zero_grad()
        model(x[hvd.rank()]).square().mean().backward()
        with pytest.raises(AssertionError, match=r"optimizer.zero_grad\(\) was called after"):
            optimizer.zero_grad()
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), expected)
    assert_same_bits(model)
    with pytest.raises(AssertionError, match="Skipping synchronization is not supported"):
        optimizer.skip_synchronize().__enter__()
    with pytest.raises(NotImplementedError, match="Adasum does not support non-global process sets yet"):
        wrap(model, torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum, process_set=hvd.ProcessSet([0]))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@ranks(2)
def test_copies_and_checkpoints_of_an_adasum_optimizer(how: str) -> None:
    hvd.init()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), op=hvd.Adasum)

    def step(net: nn.Module, made: Any, seed: int) -> None:
        made.zero_grad()
        net(data(8, 10 * seed + hvd.rank(), width=4)[0]).square().mean().backward()
        made.step()

    step(model, optimizer, 0)
    if how == "deepcopy":
        other_model, other = copy.deepcopy((model, optimizer))
    else:
        other_model, other = pickle.loads(pickle.dumps((model, optimizer)))
    assert other._farandole_path == "adasum"
    assert other.param_groups[0]["params"][0] is other_model.weight
    assert sorted(other._parameter_names.values()) == ["bias", "weight"]
    loaded_model = copy.deepcopy(model)
    loaded = wrap(loaded_model, torch.optim.SGD(loaded_model.parameters(), 0.5, momentum=0.9), op=hvd.Adasum)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors
    for net, made in ((model, optimizer), (other_model, other), (loaded_model, loaded)):
        step(net, made, 1)
    for net in (other_model, loaded_model):
        assert torch.equal(net.weight, model.weight)
        assert torch.equal(net.bias, model.bias)
    assert_same_bits(other_model)
    # A copy counts its own gradients.
    other.zero_grad()
    other_model(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(AssertionError, match="Gradients were computed more than backward_passes_per_step"):
        other_model(torch.ones(1, 4)).sum().backward()


@ranks(2)
def test_parameters_added_to_an_adasum_optimizer_meet_too() -> None:
    hvd.init()
    model = _Heads()
    optimizer = wrap(model, torch.optim.SGD(model.trunk.parameters(), 0.1), op=hvd.Adasum)
    optimizer.add_param_group({"params": list(model.heads.parameters()), "lr": 0.2})
    before = model.heads[0].weight.detach().clone()  # type: ignore[operator]
    model(data(8, hvd.rank())[0], 0).square().mean().backward()
    with pytest.raises(AssertionError, match=r"optimizer.zero_grad\(\) was called after"):
        optimizer.zero_grad()
    optimizer.step()
    assert not torch.equal(before, model.heads[0].weight)  # type: ignore[arg-type]
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_an_optimizer_outlives_its_world() -> None:
    hvd.init()
    model, reference = mlp(), mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1))
    x, y = data(8)
    train(model, optimizer, [(x, y)])
    hvd.shutdown()
    hvd.init()
    train(model, optimizer, [(x, y)] * 2)
    train_alone(reference, torch.optim.SGD(reference.parameters(), 0.1), [(x, y)] * 3)
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_models_that_differ_are_an_error_on_every_rank() -> None:
    hvd.init()
    model = nn.Linear(3, 2 + hvd.rank())
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(hvd.HorovodInternalError, match=r"parameter 'bias' is .*2.* on rank 0, .*3.* on rank 1"):
        model(torch.ones(1, 3)).sum().backward()
    assert hvd.allreduce(torch.ones(1), name="after").item() == 1
    del optimizer
