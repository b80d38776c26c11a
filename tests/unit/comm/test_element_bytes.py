"""Tensors as bytes: what torch would not view so."""

from __future__ import annotations

import pytest
import torch

from farandole.comm.messages import bytes_of


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 2)[:, 0],
        torch.ones(4, dtype=torch.complex128)[::4],
        torch.arange(6.0).view(2, 3).t(),
        torch.full((2,), 1 + 2j).conj(),
        torch.tensor(3.0),
        torch.ones(2, dtype=torch.bfloat16)[1::2],
        torch.zeros(0, 3),
    ],
)
def test_bytes_of_tensors_of_any_stride(tensor: torch.Tensor) -> None:
    found = bytes_of(tensor)
    assert found.shape == (tensor.nbytes,)
    assert torch.equal(found.view(tensor.dtype).view(tensor.shape), tensor)


def test_it_is_a_view_where_that_is_possible() -> None:
    tensor = torch.zeros(3)
    bytes_of(tensor).fill_(255)
    assert tensor.isnan().all()
