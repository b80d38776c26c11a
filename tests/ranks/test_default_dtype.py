"""A script's default type is its own: codecs and the tuner give the bits that they give without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import farandole as fd
import farandole.horovod.torch as hvd
from farandole.comm.codecs import packing, quantize
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits

CODECS = [
    "fp16", "bf16", "int8", "int8:rounding=stochastic", "fp8", "int4", "sign", "topk:0.05",
    "topk:0.05,momentum=0.5", "threshold:0.001", "randomk:0.2", "powersgd:4",
]  # fmt: skip
TYPES = [torch.float64, torch.bfloat16, torch.float16]


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    """As in a script that sets it before the codecs are made for the first time."""
    quantize._tried.cache_clear()
    packing._tables.clear()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def wide() -> nn.Sequential:
    """Return a float32 model, whatever the default is."""
    torch.manual_seed(1)
    kind = torch.float32
    return nn.Sequential(nn.Linear(64, 96, dtype=kind), nn.Tanh(), nn.Linear(96, 64, dtype=kind))


def trained(codec: str, steps: int = 3) -> nn.Sequential:
    model = wide()
    plan = fd.Plan(codec=codec, route="flat", lossy=True)
    _, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + fd.world().rank)
        x = torch.randn(4, 64, dtype=torch.float32, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert_same_bits(model)
    return model


@pytest.mark.full("further")
@pytest.mark.parametrize("dtype", TYPES)
@ranks(2)
def test_every_codec_gives_the_bits_it_gives_by_default(dtype: torch.dtype) -> None:
    fd.init()
    for codec in CODECS:
        expected = trained(codec)
        with default(dtype):
            found = trained(codec)
        for name, value in expected.state_dict().items():
            assert torch.equal(value, found.state_dict()[name]), (codec, name)


@pytest.mark.gate_cases("dtype2")
@pytest.mark.parametrize("dtype", TYPES)
@ranks(2)
def test_codec_auto_chooses(dtype: torch.dtype) -> None:
    fd.init()
    with default(dtype):
        model = trained("auto", steps=5)
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None
        assert reducer.tuner is not None
        assert reducer.tuner.choice is not None


@pytest.mark.parametrize("dtype", TYPES)
@ranks(2)
def test_compressed_operations_by_name(dtype: torch.dtype) -> None:
    hvd.init()
    x = torch.linspace(-1, 1, 8192, dtype=torch.float32) * (hvd.rank() + 1)
    expected = hvd.allreduce(x, name="before", compression=hvd.Compression.int8)
    with default(dtype):
        found = hvd.allreduce(x, name="after", compression=hvd.Compression.int8)
    assert torch.equal(expected, found)
    hvd.shutdown()
