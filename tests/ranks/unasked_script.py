"""What scripts do that train with DistributedDataParallel and have not heard of Farandole, a case after the other.

Prints a line of JSON: by case the bits that it trained to, and whether there is a world after it. ``farandole run
--no-record`` is to print the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

Model = DistributedDataParallel
STEPS = 4


def wrapped(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)), **options)


def train(model: Any, before: Callable[[Any, Any, Any], None] | None = None, accumulate: int = 1) -> None:
    torch.manual_seed(1 + dist.get_rank())
    loader = DataLoader(TensorDataset(torch.randn(8 * STEPS, 8), torch.randn(8 * STEPS, 4)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if before is not None:
        before(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        for number in range(accumulate):
            with model.no_sync() if number + 1 < accumulate else contextlib.nullcontext():
                nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def plain() -> Model:
    train(model := wrapped())
    return model


def accumulated() -> Model:
    train(model := wrapped(), accumulate=3)
    return model


def static_graph() -> Model:
    train(model := wrapped(static_graph=True))
    return model


def unused_parameters() -> Model:
    train(model := wrapped(find_unused_parameters=True, gradient_as_bucket_view=True))
    return model


def one_rank_tries_the_model() -> Model:
    """In a pass without and one with gradients, while the other waits for it."""

    def tries(model: Model, *_: Any) -> None:
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 8))
            model.train()
            model(torch.ones(2, 8)).sum()
        dist.barrier()

    train(model := wrapped(), tries)
    return model


def communication_hook() -> Model:
    def halve(model: Model, *_: Any) -> None:
        def exchange(bucket: dist.GradBucket) -> Any:
            work: Any = dist.all_reduce(bucket.buffer().div_(4), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        # Torch reads annotations, and refuses those that are texts.
        model.register_comm_hook(None, lambda state, bucket: exchange(bucket))

    train(model := wrapped(), halve)
    return model


def built_in_hook() -> Model:
    def compress(model: Model, *_: Any) -> None:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    train(model := wrapped(), compress)
    return model


def joined() -> Model:
    """Rank 1 has one batch less, and the mean is of those that are left."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    with model.join(divide_by_initial_world_size=False):
        for _ in range(STEPS - dist.get_rank()):
            model(torch.randn(2, 8)).square().mean().backward()
            optimizer.step()
    return model


def compiled() -> Model:
    model = wrapped()
    train(torch.compile(model, backend="eager"))
    return model


def compiled_step() -> Model:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(STEPS):
        model(torch.ones(2, 8)).square().mean().backward()
        step()
    return model


def two_models() -> Model:
    first, second = wrapped(), wrapped()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    for _ in range(STEPS):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            second(first(torch.full((2, 8), 1.0 + dist.get_rank())).repeat(1, 2)).square().mean().backward()
            optimizer.step()
            assert model.training
    return second


def saved_whole() -> Model:
    train(model := wrapped())
    with io.BytesIO() as file:
        torch.save(model, file)
        assert b"farandole" not in file.getvalue()
        file.seek(0)
        copy = torch.load(file, weights_only=False)
    copy(torch.ones(2, 8)).sum().backward()
    train(copy)
    return copy  # type: ignore[no-any-return]


def group_of_some() -> Model:
    group = dist.new_group(list(range(dist.get_world_size() - 1)))
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 4)
    if dist.get_rank() < dist.get_world_size() - 1:
        model = wrapped(process_group=group)
    train(model)
    return model  # type: ignore[no-any-return]


def sharded(*, is_around: bool = True) -> Any:
    """The blocks first, then the model around them, as FSDP2 wants it."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(8, 4))
    for block in (*blocks, *([model] if is_around else [])):
        fully_shard(block)
    return model


def fully_sharded() -> Any:
    train(model := sharded())
    return model


def blocks_alone() -> Any:
    """Nothing exchanges the gradients of what is in no block: no model of FSDP2."""
    train(model := sharded(is_around=False))
    return model


def sharded_two() -> Any:
    """Rank 0 clips by hand, and gradients of two passes are exchanged once."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2 * STEPS):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(torch.full((2, 8), 1.0 + dist.get_rank())).square().mean().backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model


def sharded_recorded_by_itself() -> Any:
    import farandole as fd

    train(model := sharded(), fd.record)
    fd.shutdown()
    return model


def distributed_by_itself() -> Any:
    import farandole as fd

    fd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fd.distribute(model, optimizer, fd.Plan(zero=3))
    for _ in range(STEPS):
        model(torch.full((2, 8), 1.0 + dist.get_rank())).square().mean().backward()
        optimizer.step()
    return model


def recorded_by_itself() -> Model:
    import farandole as fd

    train(model := wrapped(), fd.record)
    fd.shutdown()
    return model


def has_world() -> bool:
    module = sys.modules.get("farandole.comm.world.world")
    return module is not None and module.has_world()


def play(name: str) -> list[Any]:
    model = globals()[name]()
    wholes = [each.detach() for each in model.parameters()]
    wholes = [each.full_tensor() if isinstance(each, DTensor) else each for each in wholes]
    bits = hashlib.sha256(b"".join(each.numpy().tobytes() for each in wholes))
    return [bits.hexdigest()[:12], has_world()]


def again() -> Model:
    """In the next group of this process."""
    dist.barrier()
    dist.destroy_process_group()
    assert not has_world()
    place: dict[str, Any] = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", f"file://{Path('store').resolve()}", **place)
    return plain()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(json.dumps({name: play(name) for name in sys.argv[1:]}))
    dist.destroy_process_group()
