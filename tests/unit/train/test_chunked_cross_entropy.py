"""`fd.chunked_cross_entropy` against the plain composition: value, gradients, memory and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError
from farandole.train.verify.joined import count_means


def inputs(
    rows: int = 37, classes: int = 53, *, dtype: torch.dtype = torch.float32, ignored: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + classes)
    hidden = torch.randn(rows, 19, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, 19, dtype=dtype, requires_grad=True)
    bias = torch.randn(classes, dtype=dtype, requires_grad=True)
    targets = torch.randint(classes, (rows,))
    targets[:ignored] = -100
    return hidden, weight, targets, bias


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None, **named: Any
) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight, bias), targets, **named)


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the greatest difference, as a part of the greatest value."""
    return float((one - other).detach().abs().max() / other.detach().abs().max())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("chunk_rows", [1, 8, None])
def test_value_and_gradients_are_those_of_the_plain_composition(
    reduction: str, smoothing: float, chunk_rows: int | None
) -> None:
    for with_bias in (True, False):
        hidden, weight, targets, bias = inputs(dtype=torch.float64)
        leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
        given = bias if with_bias else None
        named = {"reduction": reduction, "label_smoothing": smoothing}
        wanted = plain(hidden, weight, targets, given, **named)
        found = fd.chunked_cross_entropy(hidden, weight, targets, given, chunk_rows=chunk_rows, **named)
        assert far(found, wanted) < 1e-12, "the loss"
        for one, other in zip(
            torch.autograd.grad(found * 3.0, leaves), torch.autograd.grad(wanted * 3.0, leaves), strict=True
        ):
            assert far(one, other) < 1e-12, "a gradient"


def test_float32_is_equal_to_a_millionth() -> None:
    hidden, weight, targets, bias = inputs(300, 1000)
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    wanted = torch.autograd.grad(plain(exact[0], exact[1], targets, exact[2]), exact)
    found = torch.autograd.grad(fd.chunked_cross_entropy(hidden, weight, targets, bias, chunk_rows=64),
                                [hidden, weight, bias])  # fmt: skip
    for one, other in zip(found, wanted, strict=True):
        assert far(one.double(), other) < 1e-6, "a gradient in float32"


def test_leading_dimensions_and_a_tied_embedding() -> None:
    table = torch.nn.Embedding(31, 8)
    tokens = torch.randint(31, (4, 7))
    results = []
    for chunked in (True, False):
        table.zero_grad()
        hidden = table(tokens).tanh()
        if chunked:
            fd.chunked_cross_entropy(hidden, table.weight, tokens.roll(1, 1), chunk_rows=5).backward()
        else:
            plain(hidden.flatten(0, 1), table.weight, tokens.roll(1, 1).flatten(), None).backward()
        assert table.weight.grad is not None, "the embedding trains"
        results.append(table.weight.grad.clone())
    assert far(results[0], results[1]) < 1e-6, "both uses of the table are in its gradient"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_type_and_gradients_keep_theirs(dtype: torch.dtype) -> None:
    hidden, weight, targets, bias = inputs(200, 300)
    leaves = [hidden, weight, bias]
    wanted = torch.autograd.grad(plain(hidden, weight, targets, bias), leaves)
    with torch.autocast("cpu", dtype=dtype):
        by_torch = torch.autograd.grad(plain(hidden, weight, targets, bias), leaves)
        loss = fd.chunked_cross_entropy(hidden, weight, targets, bias, chunk_rows=16)
        found = torch.autograd.grad(loss, leaves)
    assert loss.dtype == torch.float32, "the loss is not rounded"
    for one, torch_s, exact in zip(found, by_torch, wanted, strict=True):
        assert one.dtype == torch.float32, "gradients of float32 tensors are float32"
        assert far(one, exact) <= 1.5 * far(torch_s, exact) + 1e-6, "no further from float32 than torch's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype: torch.dtype) -> None:
    hidden, weight, targets, bias = inputs(200, 300, dtype=dtype)
    wide = [each.detach().float().requires_grad_() for each in (hidden, weight, bias)]
    wanted = torch.autograd.grad(plain(wide[0], wide[1], targets, wide[2]), wide)
    found = torch.autograd.grad(
        fd.chunked_cross_entropy(hidden, weight, targets, bias, chunk_rows=16), [hidden, weight, bias]
    )
    for one, exact in zip(found, wanted, strict=True):
        assert one.dtype == dtype, "a gradient has the type of its tensor"
        assert far(one.float(), exact) < 0.02, "a gradient in half precision"


def test_what_is_ignored_and_empty() -> None:
    hidden, weight, targets, bias = inputs(ignored=37)
    loss = fd.chunked_cross_entropy(hidden, weight, targets, bias)
    loss.backward()
    assert loss.isnan(), "the mean of nothing, as torch has it"
    assert hidden.grad is not None
    assert not hidden.grad.nan_to_num(nan=0.0, posinf=0.0).any(), "nothing pulls"
    nothing = fd.chunked_cross_entropy(hidden[:0], weight, targets[:0], bias, reduction="sum")
    assert float(nothing.detach()) == 0.0, "the sum of nothing"


def test_the_logits_are_never_whole() -> None:
    rows, classes, features, chunk = 512, 4096, 32, 32
    hidden = torch.randn(rows, features, requires_grad=True)
    weight = torch.randn(classes, features, requires_grad=True)
    targets = torch.randint(classes, (rows,))
    with torch.profiler.profile(profile_memory=True) as profiler:
        fd.chunked_cross_entropy(hidden, weight, targets, chunk_rows=chunk).backward()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    chunk_bytes, weight_bytes = 4 * chunk * classes, 4 * classes * features
    assert peak < 3 * chunk_bytes + 2 * weight_bytes + 4 * 4 * rows * features, f"{peak} bytes"
    assert peak < 4 * rows * classes / 2, "not half of the logits"


def test_frozen_parts_get_no_gradient() -> None:
    hidden, weight, targets, bias = inputs()
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    fd.chunked_cross_entropy(hidden, weight, targets, bias).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    with torch.no_grad():
        assert not fd.chunked_cross_entropy(hidden, weight, targets, bias).requires_grad


def test_a_second_backward_pass_needs_the_graph() -> None:
    hidden, weight, targets, bias = inputs()
    loss = fd.chunked_cross_entropy(hidden, weight, targets, bias)
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight)
    assert torch.equal(first, second), "kept by retain_graph"
    with pytest.raises(ConfigError, match="retain_graph"):
        torch.autograd.grad(loss, weight)
    loss = fd.chunked_cross_entropy(hidden, weight, targets, bias)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_it_is_called_from_compiled_code() -> None:
    hidden, weight, targets, bias = inputs()
    compiled = torch.compile(
        lambda h: fd.chunked_cross_entropy(h * 2.0, weight, targets, bias) * 1.0, backend="eager"
    )
    wanted = plain(hidden * 2.0, weight, targets, bias)
    assert far(compiled(hidden), wanted) < 1e-6, "a graph break, and the same"


def test_verification_counts_what_its_mean_is_over() -> None:
    seen: list[float] = []
    undo = count_means(seen.append)
    try:
        hidden, weight, targets, bias = inputs(ignored=5)
        fd.chunked_cross_entropy(hidden, weight, targets, bias)
        fd.chunked_cross_entropy(hidden, weight, targets, bias, reduction="sum")
    finally:
        for each in undo:
            each()
    assert seen == [32.0], "targets that are not ignored; a sum is no mean"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunk_rows": 0}, "chunk_rows = 0"),
        ({"chunk_rows": 2.5}, "chunk_rows = 2.5"),
        ({"reduction": "none"}, "reduction = 'none'"),
        ({"label_smoothing": 1.5}, "label_smoothing = 1.5"),
        ({"targets": torch.zeros(37)}, "expected class indices"),
        ({"targets": torch.zeros(36, dtype=torch.int64)}, "expected class indices"),
        ({"weight": torch.zeros(53, 20)}, "shape"),
        ({"bias": torch.zeros(52)}, "bias has the shape"),
        ({"weight": torch.zeros(53, 19, dtype=torch.float64)}, "one floating-point type"),
        ({"hidden": "text"}, "hidden is a str"),
        ({"targets": torch.full((37,), 53)}, "target 53"),
        ({"targets": torch.full((37,), -1)}, "target -1"),
    ],
)
def test_refusals_name_the_value(change: dict[str, Any], words: str) -> None:
    hidden, weight, targets, bias = inputs()
    given = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias, **change}
    with pytest.raises(ConfigError, match=words):
        fd.chunked_cross_entropy(**given)
