"""A forward pass divided into spans: calls of a model's parts, and its own code between them.

Parts are what a pipeline calls whole: repeated blocks, and children of the modules around them. Everything that is
observed of a pass is written into the span during which it happened; operations of a backward pass belong to the
span in which autograd made their node, which its sequence number says.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan
from ...parallel.blocks import repeated_blocks
from ...parallel.changed_class import features_of
from ...parallel.expert.layer import ExpertMLPs, MixtureOfExperts
from ...parallel.expert.transformers_experts import is_experts_module
from ...parallel.pipeline.trace import traced_through
from ...parallel.tensor.apply_tensor import find_recipe
from ...parallel.tensor.recipe import LayerPart, TensorRecipe, add_head_counts, find_units, refuse_layers


@dataclass
class Attention:
    """Calls of `scaled_dot_product_attention` in a span, those inside of `nn.MultiheadAttention` too."""

    heads: int = 0
    """Heads of queries; with several calls what all are a multiple of."""
    key_value_heads: int = 0
    query_bytes: float = 0.0
    key_value_bytes: float = 0.0
    sequence: int = 0
    saved_bytes: float = 0.0
    has_dropout: bool = False
    flops: float = 0.0
    """What attention in one kernel computes."""
    backward_flops: float = 0.0
    undivided: str = ""
    """What context parallel refuses; with it the sequences of the model cannot be divided."""


@dataclass
class Divided:
    """What the recipe for tensor parallel would divide in a span."""

    flops: float = 0.0
    saved_bytes: float = 0.0
    sum_bytes: float = 0.0
    forward_sums: int = 0
    backward_sums: int = 0


@dataclass
class Experts:
    """What the experts in a span do."""

    flops: float = 0.0
    token_bytes: float = 0.0


@dataclass
class PassSpan:
    """What was seen during one call of a part, or between calls. Bytes of numbers are those they have in fp32."""

    name: str
    """Name of the module; empty: code between modules."""
    module: nn.Module | None
    inputs: tuple[Any, ...] = ()
    """Shapes and types of the tensors it was called with."""
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    uncast_flops: float = 0.0
    operations: int = 0
    products: int = 0
    moved_bytes: float = 0.0
    saved_bytes: float = 0.0
    output_bytes: float = 0.0
    divided: Divided = field(default_factory=Divided)
    experts: Experts = field(default_factory=Experts)
    attention: Attention = field(default_factory=Attention)


class PassSpans:
    """The spans of one forward pass of `model`, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.all: list[PassSpan] = []
        self.parts = dict(parts_of(model))
        self.blocks = {name for name, _ in repeated_blocks(model)}
        self._begins: list[int] = []
        self._depth = 0

    @property
    def current(self) -> PassSpan:
        """The span that is open."""
        return self.all[-1]

    def of_node(self, number: int) -> PassSpan:
        """Return the span in which autograd made the node with this sequence number."""
        return self.all[max(0, bisect_right(self._begins, number) - 1)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Fill `all` by the forward pass inside."""
        handles = []
        for name, module in self.parts.items():
            handles += [
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        self._open(PassSpan("", None))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _open(self, span: PassSpan) -> None:
        self.all.append(span)
        self._begins.append(torch.autograd._get_sequence_nr())

    def _enter(self, name: str, module: nn.Module, arguments: Any, named: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._open(PassSpan(name, module, inputs=_shapes(arguments, named)))

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self.current.output_bytes = sum(map(fp32_bytes, leaves))
            self._open(PassSpan("", None))


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a pipeline calls whole, with their names."""
    opened = traced_through(model)

    def inside(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            if child in seen:
                continue
            seen.add(child)
            if child in opened or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                yield from inside(child, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", child

    seen: set[nn.Module] = set()
    yield from inside(model, "")


def fp32_bytes(tensor: torch.Tensor) -> float:
    """Return the bytes of the elements of `tensor`, in fp32 if they are floating-point."""
    return tensor.numel() * (4 if tensor.is_floating_point() else tensor.element_size())


def _shapes(arguments: Any, named: Any) -> tuple[Any, ...]:
    leaves = tree_leaves((arguments, named))
    return tuple((tuple(each.shape), each.dtype) for each in leaves if isinstance(each, torch.Tensor))


# What is known of modules inside of a model's parts: layers that tensor parallel divides, and experts.


ANY_DEGREE = 20160
"""A vocabulary is divided unevenly, over any number of ranks; its limit is a multiple of this or 64."""
_OF_ONE_TOKEN = ("activation", "container", "linear", "transformer")
"""Files of torch with modules that take each token for itself, if they have no matrix."""
_OVER_TOKENS = (nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.GLU)
"""Modules in these files that may be told to go over tokens."""


@dataclass
class Marks:
    """Layers and experts of one model."""

    layers: dict[nn.Module, LayerPart] = field(default_factory=dict)
    """Layers that would be divided."""
    gathers: set[nn.Module] = field(default_factory=set)
    """Those by columns whose output is gathered."""
    regions: set[nn.Module] = field(default_factory=set)
    """Modules in which a layer by rows follows one by columns: attention between them is divided."""
    experts: dict[nn.Module, int] = field(default_factory=dict)
    """Modules that hold all experts of a layer, with how many these are."""
    names: dict[nn.Module, str] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    """Whole numbers of modules that the user's recipe divides, by name of the module."""
    notes: list[str] = field(default_factory=list)


def find_marks(model: nn.Module, tensor_recipe: Mapping[str, str]) -> Marks:
    """Return what is known of the modules of `model`. Nothing is changed.

    Raises `PlanError` for a pattern of the user's recipe that matches nothing, or modules of other kinds.
    """
    plan = Plan(tensor=2, tensor_recipe=tensor_recipe)
    marks = Marks(names={module: name for name, module in model.named_modules()})
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            marks.experts[module.experts] = module.routing.num_experts
        elif is_experts_module(module) and not isinstance(module, ExpertMLPs):
            marks.experts[module] = int(vars(module)["num_experts"])
        elif type(module).__name__.endswith("Experts"):
            marks.notes.append(f"{name} ({type(module).__name__}): experts of a form that is not known")
    recipe, unknown = find_recipe(model, plan)
    if unknown:
        marks.notes.append(f"tensor: styles of transformers that are not known: {', '.join(unknown)}")
    if not any(part.kind != "whole" for part in recipe.parts.values()):
        return marks
    try:
        refuse_layers(model, recipe, plan)
    except PlanError as error:
        marks.notes.append(str(error))
        return marks
    units, marks.numbers = find_units(model, recipe), recipe.attributes
    for name, part in recipe.parts.items():
        if part.kind != "whole":
            marks.layers[model.get_submodule(name)] = part
    marks.gathers = {model.get_submodule(name) for name in units.gathers}
    for name, layers in units.layers.items():
        if {"columns", "rows"} <= {recipe.parts[layer].kind for layer in layers}:
            marks.regions.add(model.get_submodule(name))
    return marks


def marks_inside(marks: Marks, block: nn.Module) -> list[Any]:
    """Return what is known inside of a block, by names relative to it: the user's recipe may single blocks out."""
    found: list[Any] = []
    for name, module in block.named_modules():
        part = marks.layers.get(module)
        numbers = marks.numbers.get(marks.names[module])
        if part is not None or numbers:
            found.append((name, part and (part.kind, part.packed), module in marks.gathers, numbers))
    return found


def limit_of(marks: Marks, model: nn.Module, within: nn.Module) -> int:
    """Return the largest number of ranks that the recipe can divide the layers inside `within` over; 0: none."""
    inside = {marks.names[each]: marks.layers[each] for each in within.modules() if each in marks.layers}
    if not inside:
        return 0
    numbers = (each for of in within.modules() for each in marks.numbers.get(marks.names[of], {}).values())
    limits = (_limit_of_layer(model.get_submodule(name), part) for name, part in inside.items())
    shared = math.gcd(*limits, *numbers)
    gathers = {marks.names[each] for each in marks.gathers}
    for degree in (each for each in range(shared, 0, -1) if shared % each == 0):
        try:
            add_head_counts(TensorRecipe(dict(inside)), model, gathers, degree)
        except PlanError:
            continue
        return degree
    return 0


def divided_by(marks: Marks, within: nn.Module) -> dict[int, Literal["tensor", "expert"]]:
    """Return, by id, the parameters inside `within` that a degree would divide, and which degree."""
    found: dict[int, Literal["tensor", "expert"]] = {}
    for module in within.modules():
        if module in marks.experts:
            found.update({id(parameter): "expert" for parameter in module.parameters()})
        part = marks.layers.get(module)
        if part is None:
            continue
        for name, parameter in module.named_parameters():
            # A bias is added once, after the sum.
            is_whole = part.kind == "rows" and name == "bias"
            if not is_whole and not (part.kind == "attention" and name == "out_proj.bias"):
                found[id(parameter)] = "tensor"
    return found


def may_divide_tokens(marks: Marks, block: nn.Module) -> bool:
    """Return whether all of a block that may mix tokens is divided by a recipe, and so is given all of them."""
    inside = {each: marks.layers[each].kind for each in block.modules() if each in marks.layers}
    # What gathers its output gives all features of this rank's tokens.
    split = [each for each, kind in inside.items() if each not in marks.gathers and kind != "vocabulary"]
    if any(isinstance(each, nn.MultiheadAttention) and not each.batch_first for each in split):
        return False
    divided = {inner for each in split for inner in each.modules()}
    return bool(split) and not any(_may_mix(each) for each in block.modules() if each not in divided)


def _may_mix(module: nn.Module) -> bool:
    """Return whether what a whole module does with one token may depend on others, or be drawn for all of them."""
    parameters, buffers = list(module.parameters(recurse=False)), list(module.buffers(recurse=False))
    if any(each.dim() > 1 and each.is_floating_point() for each in [*parameters, *buffers]):
        return True
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return len(module.normalized_shape) > 1
    if isinstance(module, (nn.Dropout, nn.AlphaDropout)):
        return False
    names = [each.__module__ for each in type(module).__mro__ if each is not nn.Module]
    of_torch = [name.rpartition(".")[2] for name in names if name.startswith("torch.nn.modules.")]
    if of_torch:
        return of_torch[0] not in _OF_ONE_TOKEN or isinstance(module, _OVER_TOKENS)
    # Norms have parameters, and blocks have children; what has neither may drop whole samples.
    return not parameters and not any(module.children()) and names[0] != "transformers.activations"


def _limit_of_layer(layer: nn.Module, part: LayerPart) -> int:
    if isinstance(layer, nn.MultiheadAttention):
        return int(layer.num_heads)
    if part.kind == "vocabulary":
        words = layer.num_embeddings if isinstance(layer, nn.Embedding) else features_of(layer)[1]
        step = next((each for each in (ANY_DEGREE, 64) if words >= each), 1)
        return words - words % step
    if isinstance(layer, nn.Embedding):
        return layer.embedding_dim
    inputs, outputs = features_of(layer)
    return inputs if part.kind == "rows" else outputs // part.packed
