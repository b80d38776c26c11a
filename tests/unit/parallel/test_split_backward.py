"""A backward pass in two parts: gradients come in an order that does not depend on where nodes lie in memory."""

from __future__ import annotations

import torch
from torch import nn

from farandole.parallel.pipeline.stage import backward_inputs


def run(order: list[int], garbage: list[object]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the gradients of the input and of the parameters; `order` is filled with these as they come."""
    torch.manual_seed(1)
    layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(6)])
    for number, each in enumerate(layers.parameters()):
        each.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    x = torch.ones(2, 3, requires_grad=True)
    y = x * 1.0
    for layer in layers:
        y = y + torch.tanh(layer(y))
        garbage.append(torch.ones(1, requires_grad=True) * 2)  # nodes lie elsewhere in each run
    found, rest = backward_inputs([y], [torch.ones_like(y)], [x])
    rest.run()
    assert found[0] is not None, "the input has a gradient"
    return found[0], [each.grad for each in layers.parameters() if each.grad is not None]


def test_parameters_get_their_gradients_in_one_order() -> None:
    garbage: list[object] = []
    orders = []
    for _ in range(8):
        order: list[int] = []
        run(order, garbage)
        orders.append(order)
    assert sorted(orders[0]) == list(range(12))
    assert all(each == orders[0] for each in orders), orders
