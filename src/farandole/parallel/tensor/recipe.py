"""What becomes of each layer: the recipe, as data, before anything is changed."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import fx, nn
from torch.nn import functional

from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import nearest
from ..blocks import repeated_blocks
from ..changed_class import features_of, is_transposed, plain_class_of, require_changeable
from ..frozen_model import DOWN, frozen_weights
from ..frozen_weight import FORMS, FrozenWeight
from .split_layers import is_linear

# Units: the modules around a split region, from its beginning to its end, whose output every rank has whole.


@dataclass
class Units:
    """The units of a recipe."""

    layers: dict[str, list[str]] = field(default_factory=dict)
    """The split layers of each unit, by the names of both."""
    gathers: set[str] = field(default_factory=set)
    """Layers by columns that no layer by rows follows: their output is gathered."""


def find_units(model: nn.Module, recipe: TensorRecipe) -> Units:
    """Return the units of `recipe`.

    The unit of a layer by columns is the innermost module that also has a layer by rows after it, up to the
    repeated block that it is in. Without one the layer is a unit of its own, and so are layers of other kinds.
    """
    units = Units()
    blocks = {name for name, _ in repeated_blocks(model)}
    order = recipe.of_kind("columns", "rows")
    order = [name for name in order if not isinstance(model.get_submodule(name), nn.Embedding)]
    closed: set[str] = set()
    for at, name in enumerate(order):
        if recipe.parts[name].kind != "columns":
            continue
        found = _around(name, [each for each in order[at:] if recipe.parts[each].kind == "rows"], blocks)
        if found is None:
            units.gathers.add(name)
            units.layers.setdefault(name, []).append(name)
        else:
            units.layers.setdefault(found, []).append(name)
            closed.add(found)
    for name in order:
        if recipe.parts[name].kind == "rows":
            unit = next((each for each in parents(name) if each in closed), name)
            units.layers.setdefault(unit, []).append(name)
    for name in recipe.parts:
        if name not in order and recipe.parts[name].kind != "whole":
            units.layers.setdefault(name, []).append(name)
    return units


def _around(name: str, rows: list[str], blocks: set[str]) -> str | None:
    for parent in parents(name):
        prefix = f"{parent}." if parent else ""
        if any(each.startswith(prefix) for each in rows):
            return parent
        if parent in blocks:
            return None
    return None


Kind = Literal["columns", "rows", "vocabulary", "attention", "whole"]
"""Split by output features; by input features; by words; torch's own attention, by heads; or not at all."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class LayerPart:
    """What becomes of one layer."""

    kind: Kind
    source: str
    """Who says so, for notices."""
    packed: int = 1
    """Equal matrices that the weight of a layer by columns consists of, such as those of query, key and value."""


@dataclass
class TensorRecipe:
    """What becomes of each layer of a model, by its name, in the order of `named_modules`."""

    parts: dict[str, LayerPart] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Whole numbers of modules, by the modules' names, that are divided: counts of heads, widths of heads."""
    by_user: set[str] = field(default_factory=set)
    """Names that the plan's patterns match."""

    def add(self, found: Mapping[str, LayerPart]) -> None:
        """Add parts that belong together, unless the user has said something of one of them."""
        if not self.by_user.intersection(found):
            for name, part in found.items():
                self.parts.setdefault(name, part)

    def of_kind(self, *kinds: Kind) -> list[str]:
        """Return the names of the layers of `kinds`."""
        return [name for name, part in self.parts.items() if part.kind in kinds]

    def order_by(self, model: nn.Module) -> None:
        """Bring the parts into the order of `model`."""
        self.parts = {name: self.parts[name] for name, _ in model.named_modules() if name in self.parts}


def parents(name: str) -> Iterator[str]:
    """Yield the names of the modules around `name`, from the inside; the model itself is the empty name."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def even(count: int, size: int, what: str) -> int:
    """Return `count` / `size`; raise `PlanError` if that is no whole number."""
    if count % size:
        fitting = [str(each) for each in range(2, count + 1) if count % each == 0][:4]
        raise PlanError(
            f"plan: tensor = {size} does not divide {what} = {count}",
            remedy=f"set tensor to {' or '.join(fitting)}"
            if fitting
            else "leave this layer whole by tensor_recipe",
        )
    return count // size


def spread(count: int, size: int) -> tuple[int, ...]:
    """Return how many of `count` each of `size` ranks has, as equal as can be."""
    return tuple(count // size + (rank < count % size) for rank in range(size))


# Counts of heads: whole numbers of attention modules, which are this rank's once their layers are split.

_COUNTS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "nheads", "num_q_heads",
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads",
)  # fmt: skip
_WIDTHS = ("split_size", "all_head_size", "inner_dim", "inner_size")
"""Features of all heads together."""
_HEAD = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "dim_head")
"""Features of one head, which stay."""


def add_head_counts(recipe: TensorRecipe, model: nn.Module, gathers: set[str], size: int) -> None:
    """Let the recipe divide the counts of heads of modules whose layers are split by columns.

    Raises `PlanError` naming the module if its heads do not divide.
    """
    for name in recipe.of_kind("columns"):
        layer: Any = model.get_submodule(name)
        if name in gathers or isinstance(layer, nn.Embedding):
            continue
        parent = name.rpartition(".")[0]
        module = model.get_submodule(parent)
        known = recipe.attributes.setdefault(parent, {})
        for key in (*_COUNTS, *_WIDTHS):
            value = vars(module).get(key)
            if type(value) is int and key not in known:
                if value % size:
                    raise _indivisible(parent or type(model).__name__, key, value, size)
                known[key] = value
        features = features_of(layer)[1] // recipe.parts[name].packed
        for key in _HEAD:
            width = vars(module).get(key)
            if type(width) is int and width > 0 and features % width == 0 and features % (width * size):
                raise _indivisible(name, "heads", features // width, size)
    recipe.attributes = {name: numbers for name, numbers in recipe.attributes.items() if numbers}


def _indivisible(name: str, key: str, value: int, size: int) -> PlanError:
    fitting = [str(each) for each in range(2, value + 1) if value % each == 0]
    what = f"{value} heads" if key == "heads" else f"{key} = {value}"
    return PlanError(
        f"plan: tensor = {size} does not divide the {what} of {name!r}",
        remedy=f"set tensor to {', '.join(fitting[:4])}, or leave {name!r} whole by tensor_recipe"
        if fitting
        else f'leave the layers around {name!r} whole: tensor_recipe = {{ "{name}*" = "whole" }}',
    )


# What cannot be split: refused by name, before anything is changed.


def refuse_layers(model: nn.Module, recipe: TensorRecipe, plan: Plan) -> None:
    """Raise `PlanError` for layers whose weights are not plain parameters of the layer alone, or will not be."""
    encoded = {id(weight) for weight, _ in frozen_weights(model)} if plan.frozen_codec in FORMS else set()
    for name, part in recipe.parts.items():
        if part.kind == "whole":
            continue
        layer: Any = model.get_submodule(name)
        require_changeable(layer, f"plan: tensor, layer {name!r}")
        why = _why_not(layer)
        if any(id(each) in encoded or isinstance(each, FrozenWeight) for each in layer.parameters()):
            why = "its frozen weight is stored in few bits (frozen_codec)"
        if part.kind == "vocabulary" and not (is_linear(layer) or isinstance(layer, nn.Embedding)):
            why = f'a {type(layer).__name__} has no "vocabulary"'
        if why:
            raise PlanError(
                f"plan: tensor: {name!r} cannot be split: {why}",
                remedy=f'leave it whole: tensor_recipe = {{ "{name}" = "whole" }}',
            )


def _why_not(layer: nn.Module) -> str:
    if torch.nn.utils.parametrize.is_parametrized(layer):
        return "its weight is a parametrization, made anew in each forward pass"
    if hasattr(layer, "weight_g") or hasattr(layer, "weight_orig") or hasattr(layer, "weight_v"):
        return "its weight is made of others by a hook (weight norm, spectral norm or pruning)"
    if hasattr(layer, DOWN) or hasattr(layer, "lora_A"):
        return "it has low-rank adapters, which are not split with it"
    if any(
        not isinstance(each, nn.Parameter) or type(each.data) is not torch.Tensor for each in layer.parameters()
    ):
        return "its weight is a tensor of another class"
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "max_norm looks at whole rows of the embedding"
    if isinstance(layer, nn.Embedding) and (layer.sparse or layer.scale_grad_by_freq):
        return "its gradients are sparse, or scaled by how often a word occurs"
    return ""


# What becomes of each layer: by the user's names, by classes of torch and transformers, by traces, by words.


DIVIDE = "divide"
_NAMES = 12
"""Names that an error lists at most."""


def add_by_name(recipe: TensorRecipe, model: nn.Module, wanted: Mapping[str, str]) -> None:
    """Add what `wanted` says of layers and of whole numbers of modules; the last pattern that matches counts.

    Raises `PlanError` for patterns that match nothing, or modules of other kinds.
    """
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    numbers = {
        f"{name}.{key}" if name else key: (name, key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) is int and not key.startswith("_")
    }
    for pattern, word in wanted.items():
        if word == DIVIDE:
            _add_numbers(recipe, pattern, numbers)
            continue
        kind = next(each for each in KINDS if each == word)
        matching = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        layers = {name: module for name, module in matching.items() if _takes(module, kind)}
        if not layers:
            raise _no_match(pattern, kind, matching, modules)
        for name in layers:
            recipe.parts[name] = LayerPart(kind, f"tensor_recipe {pattern!r}")
            recipe.by_user.add(name)


def _add_numbers(recipe: TensorRecipe, pattern: str, numbers: Mapping[str, tuple[str, str, int]]) -> None:
    found = [each for name, each in numbers.items() if fnmatchcase(name, pattern)]
    if not found:
        raise PlanError(
            f"plan: tensor_recipe: the pattern {pattern!r} matches no whole number of a module",
            remedy=_nearest(pattern, list(numbers)),
        )
    for name, key, value in found:
        recipe.attributes.setdefault(name, {})[key] = value


def _takes(module: nn.Module, kind: Kind) -> bool:
    if kind == "whole":
        return is_linear(module) or isinstance(module, (nn.Embedding, nn.MultiheadAttention))
    if kind == "attention":
        return isinstance(module, nn.MultiheadAttention)
    return is_linear(module) or isinstance(module, nn.Embedding)


def _no_match(
    pattern: str, kind: Kind, matching: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]
) -> PlanError:
    fit = [name for name, module in modules.items() if _takes(module, kind)]
    if matching:
        name, module = next(iter(matching.items()))
        return PlanError(
            f'plan: tensor_recipe: {pattern!r} = "{kind}" matches {name!r}, a {plain_class_of(module).__name__}, '
            "expected a Linear or Embedding layer",
            remedy=_nearest(pattern, fit),
        )
    return PlanError(
        f"plan: tensor_recipe: the pattern {pattern!r} matches no layer", remedy=_nearest(pattern, fit)
    )


def _nearest(pattern: str, names: list[str]) -> str:
    ends = {name.rpartition(".")[2]: None for name in names}
    begin, dot, end = pattern.rpartition(".")
    near = nearest(pattern, names)
    if near is None and "*" in begin and (tail := nearest(end, ends)) is not None:
        near = f"{begin}{dot}{tail}"
    return f"did you mean {near!r}?" if near else f"there are: {', '.join(names[:_NAMES]) or 'none'}"


# Recipes of modules that are known by their class: torch's transformer layers, and transformers' models.
#
# transformers says itself how its models are split: ``_tp_plan``, by patterns in which ``*`` is a number. What a
# style of it means here is one table. transformers is not imported.

_STYLES = {
    "colwise": LayerPart("columns", "transformers"),
    "packed_colwise": LayerPart("columns", "transformers", packed=2),
    "colwise_gather_output": LayerPart("vocabulary", "transformers"),
    "colwise_rep": LayerPart("vocabulary", "transformers"),
    "rowwise": LayerPart("rows", "transformers"),
    "rowwise_split_input": LayerPart("rows", "transformers"),
    "embedding_rowwise": LayerPart("vocabulary", "transformers"),
}  # fmt: skip
_NOTHING_TO_SPLIT = ("replicated_with_grad_allreduce", "replicate", "sequence_parallel")
"""Styles of layers that stay whole: whether their gradient is a sum is found out by the proof."""
_GPT2 = {
    "attn": {"c_attn": LayerPart("columns", "GPT-2", packed=3), "c_proj": LayerPart("rows", "GPT-2")},
    "mlp": {"c_fc": LayerPart("columns", "GPT-2"), "c_proj": LayerPart("rows", "GPT-2")},
}


def add_torch_layers(recipe: TensorRecipe, model: nn.Module) -> None:
    """Add torch's attention, and the two linear layers of its transformer layers."""
    for name, module in model.named_modules():
        kind = plain_class_of(module)
        if isinstance(module, nn.MultiheadAttention) and kind.forward is nn.MultiheadAttention.forward:
            recipe.add({name: LayerPart("attention", "torch.nn.MultiheadAttention")})
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)) and _has_own_forward(kind):
            prefix, source = f"{name}." if name else "", f"torch.nn.{kind.__name__}"
            recipe.add(
                {f"{prefix}linear1": LayerPart("columns", source), f"{prefix}linear2": LayerPart("rows", source)}
            )


def _has_own_forward(kind: type[nn.Module]) -> bool:
    return any(
        issubclass(kind, each) and kind._ff_block is each._ff_block and kind.forward is each.forward
        for each in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )


def add_transformers(recipe: TensorRecipe, model: nn.Module) -> list[str]:
    """Add what transformers says of its own models; return the styles that are not known here, with a name each.

    Layers of one parent belong together: if one has an unknown style, none of them is split.
    """
    unknown: dict[str, str] = {}
    for prefix, module in model.named_modules():
        groups: dict[str, dict[str, LayerPart | None]] = {}
        for path, style in _styles(module):
            name = f"{prefix}.{path}" if prefix else path
            parent = name.rpartition(".")[0]
            layer = model.get_submodule(name)
            if style in _NOTHING_TO_SPLIT:
                continue
            fits = is_linear(layer) or isinstance(layer, nn.Embedding)
            part = _STYLES.get(style) if fits else None
            groups.setdefault(parent, {})[name] = part
            if part is None:
                unknown.setdefault(style, name)
        for group in groups.values():
            known = {name: part for name, part in group.items() if part is not None}
            if len(known) == len(group):
                recipe.add(known)
        if plain_class_of(module).__name__ in ("GPT2Block", "DecisionTransformerGPT2Block"):
            _add_gpt2(recipe, prefix, module)
    return [f"{name} ({style})" for style, name in unknown.items()]


def _styles(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the paths of layers below `module` and their styles, by the plan of its class or configuration."""
    own = vars(module).get("_tp_plan") or getattr(type(module), "_tp_plan", None)
    of_base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if not hasattr(module, "base_model_prefix"):
        return
    plan: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    base = getattr(module, str(module.base_model_prefix), None)
    if isinstance(of_base, dict) and (base is None or base is module):
        plan.update(of_base)
    if not plan:
        return
    patterns = [(re.compile(re.escape(pattern).replace(r"\*", r"\d+")), style) for pattern, style in plan.items()]
    for path, _ in module.named_modules():
        for pattern, style in patterns:
            if path and pattern.fullmatch(path):
                yield path, str(style)


def _add_gpt2(recipe: TensorRecipe, prefix: str, block: nn.Module) -> None:
    for part, layers in _GPT2.items():
        found = {f"{prefix}.{part}.{name}": each for name, each in layers.items()}
        parent = getattr(block, part, None)
        if isinstance(parent, nn.Module) and all(
            is_transposed(getattr(parent, name, nn.Identity())) for name in layers
        ):
            recipe.add(found)


# Pairs of linear layers with only elementwise operations between them (Shoeybi et al. 2019, section 3).
#
# The module around them is traced by `torch.fx` with its children as leaves: no input is needed. A module that
# cannot be traced has no pairs.

_MODULES = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Softplus,
    nn.Softsign, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.Mish, nn.LogSigmoid, nn.Identity, nn.Dropout,
)  # fmt: skip
_FUNCTIONS = {
    functional.relu, functional.gelu, functional.silu, functional.elu, functional.leaky_relu, functional.mish,
    functional.dropout, functional.hardswish, functional.softplus, functional.sigmoid, functional.tanh,
    functional.selu, functional.relu6, torch.relu, torch.tanh, torch.sigmoid, torch.square, torch.mul, torch.add,
    torch.sub, torch.neg, operator.mul, operator.add, operator.sub, operator.neg, operator.pow, torch.pow,
}  # fmt: skip
_METHODS = {"relu", "tanh", "sigmoid", "mul", "add", "sub", "square", "pow", "neg"}


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def add_pairs(recipe: TensorRecipe, model: nn.Module) -> None:
    """Add the pairs of modules that hold at least two linear layers themselves."""
    for name, module in model.named_modules():
        linear = [child for child, each in module.named_children() if is_linear(each)]
        if len(linear) < 2 or plain_class_of(module).forward is nn.Module.forward:
            continue
        for group in find_pairs(module):
            found = {f"{name}.{path}" if name else path: part for path, part in group.items()}
            if not any(path in recipe.parts for path in found):
                recipe.add(found)


def find_pairs(module: nn.Module) -> list[dict[str, LayerPart]]:
    """Return groups of children of `module`: layers by columns, and the one by rows to which all of them lead."""
    try:
        graph = _Tracer().trace(module)
    except Exception:  # any code may be in a forward pass: what cannot be traced has no pairs
        return []
    called: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            called[str(node.target)] = called.get(str(node.target), 0) + 1
    groups, taken = [], set[str]()
    for node in graph.nodes:
        if not _is_linear_call(node, module):
            continue
        first = _leads_from(node.args[0] if node.args else None, module)
        names = [str(each.target) for each in first] if first else []
        group = {*names, str(node.target)}
        once = all(called[name] == 1 for name in group) and str(node.target) not in names
        if (
            names
            and once
            and not group & taken
            and all(_leads_only_to(each, node, module) for each in first or ())
        ):
            taken |= group
            source = "traced pair"
            groups.append(
                {**dict.fromkeys(names, LayerPart("columns", source)), str(node.target): LayerPart("rows", source)}
            )
    return groups


def _leads_from(node: Any, module: nn.Module) -> list[fx.Node] | None:
    """Return the linear layers that `node` is made of elementwise; None if of anything else."""
    if not isinstance(node, fx.Node):
        return []
    if _is_linear_call(node, module):
        return [node]
    if not _is_elementwise(node, module):
        return None
    found: list[fx.Node] = []
    for each in node.all_input_nodes:
        before = _leads_from(each, module)
        if before is None:
            return None
        found += [one for one in before if one not in found]
    return found or None


def _leads_only_to(node: fx.Node, end: fx.Node, module: nn.Module) -> bool:
    """Return whether all that is made of `node` goes into `end`, by elementwise operations."""
    return bool(node.users) and all(
        user is end or (_is_elementwise(user, module) and _leads_only_to(user, end, module)) for user in node.users
    )


def _is_linear_call(node: fx.Node, module: nn.Module) -> bool:
    return node.op == "call_module" and is_linear(module.get_submodule(str(node.target)))


def _is_elementwise(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return isinstance(called, _MODULES) or _is_plain_activation(called)
    return (node.op == "call_function" and node.target in _FUNCTIONS) or (
        node.op == "call_method" and node.target in _METHODS
    )


def _is_plain_activation(module: nn.Module) -> bool:
    """Return whether it is one of transformers' activations."""
    kind = plain_class_of(module)
    return kind.__module__ == "transformers.activations" and next(module.parameters(), None) is None


# Embeddings and output layers over one vocabulary, split by words.


def add_vocabulary(recipe: TensorRecipe, model: nn.Module) -> None:
    """Add pairs of an embedding and a linear layer of equal vocabulary outside repeated blocks; tied or not."""
    inside = tuple(f"{name}." for name, _ in repeated_blocks(model))
    outside = [
        (name, each) for name, each in model.named_modules() if not f"{name}.".startswith(inside or ("\0",))
    ]
    embeddings = [(name, each) for name, each in outside if isinstance(each, nn.Embedding) and _is_plain(each)]
    outputs = [(name, each) for name, each in outside if isinstance(each, nn.Linear) and is_linear(each)]
    for name, embedding in embeddings:
        for output_name, output in outputs:
            shape = (output.out_features, output.in_features)
            is_tied = output.weight is embedding.weight
            if is_tied or shape == (embedding.num_embeddings, embedding.embedding_dim):
                source = "one vocabulary"
                recipe.add({name: LayerPart("vocabulary", source), output_name: LayerPart("vocabulary", source)})


def _is_plain(embedding: nn.Embedding) -> bool:
    return embedding.max_norm is None and not embedding.sparse and not embedding.scale_grad_by_freq
