"""ZeRO stage 3 (Rajbhandari et al. 2020, section 5.3) on torch's FSDP2, with our collectives.

`shard_parameters` cuts a model that is the same on all ranks, in place: each of its repeated blocks and what is
left become units of `fully_shard`, gathered before they run and freed afterwards. Parameters are DTensors from
then on, and so are gradients and optimizer states. What happens in a step: `fsdp_passes`.

[Note: what is one unit] A block whose parameters are used elsewhere too (tied) is left to the unit of the whole
model, and so is one without a forward pass of its own: a unit is gathered when its module is called.

[Note: the next unit] Streams of an accelerator let the next unit be gathered while one runs. The CPU has none:
there exchanges are asynchronous instead, and the next block, in the order of the model, is asked for when one
begins. One that does not run after all is forgotten at the end of the forward pass, or it would run with old
parameters.

FSDP2 hangs the gathering for backward on a unit's outputs. An operation in place on a view would take its hook off
without a word, and backward would run without parameters; FSDP2 warns of that in every pass. Here its hook gets a
tensor that is no view, and the user a view of it, which autograd does not let anyone change in place. Nothing is
copied.

All ranks are one dimension. With ``shard_within = "host"`` there are two: hosts, which hold copies of each other
(HSDP), and the ranks of a host, which hold shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from ... import backend as _registered
from ...comm.codecs.registry import packer_of
from ...comm.world.world import World
from ...core.vocabulary.codec_spec import NONE, CodecSpec
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.rules import MOST_ZERO
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ..blocks import repeated_blocks
from ..data.batch_norm import BufferSync
from ..frozen_weight import FrozenWeight
from ..model import Strategy
from ..optim.bf16_parameters import narrowable
from ..optim.elementwise import why_not_sharded
from ..optim.step_hooks import is_nested_step, undo_after_errors
from ..split import carry_marks, is_of_expert
from .comm_coded import CodedAllGather, CodedReduceScatter
from .passes import ShardedModel

# The mesh of ranks that stage 3 shards over: our process groups as a `DeviceMesh` of torch.
HOSTS, RANKS = "hosts", "ranks"
"""Names of the dimensions, before those of their groups."""


class _Meshes(dict[str, DeviceMesh]):
    """The meshes of one world, by what they shard within: tensors of several models meet in one norm."""


def make_mesh(here: World, plan: Plan, device_type: str, copies: int = 1) -> DeviceMesh:
    """Return the mesh that parameters are sharded over; to be called by all ranks.

    `copies`: sharded over as many runs of ranks, each of which has all parameters; 1: as ``shard_within`` says.

    CPU tensors travel by our own backend, those of an accelerator by the world's.

    Raises:
        PlanError: with ``shard_within = "host"`` where each host has one rank, so that nothing would be sharded.
    """
    meshes = here.session.keep(_Meshes, _Meshes)
    key = f"{plan.shard_within} {copies} {device_type} {plan.timeout_seconds}"
    if key not in meshes:
        meshes[key] = _make_mesh(here, plan, device_type, copies)
    return meshes[key]


def _make_mesh(here: World, plan: Plan, device_type: str, copies: int) -> DeviceMesh:
    """See `make_mesh`.

    torch keeps layouts by equal meshes, also of a world that is over, and looks groups up by name. So the name of
    the group is part of the mesh.
    """
    _registered.register()
    name = "farandole" if device_type == "cpu" else None
    if copies == 1 and (plan.shard_within == "world" or here.node_count == 1):
        group = here.new_group(timeout_seconds=plan.timeout_seconds, backend=name)
        assert group is not None, "several ranks have a group"
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=(_named(RANKS, group),))
    if copies == 1 and here.local_size == 1:
        raise PlanError(
            f'plan: shard_within = "host", but each of the {here.node_count} hosts has one rank, so every rank '
            "would hold all parameters",
            remedy='set shard_within = "world"',
        )
    width = here.local_size if copies == 1 else here.size // copies
    cross, node = here.new_host_groups(width, timeout_seconds=plan.timeout_seconds, backend=name)
    ranks = torch.tensor(here.job_ranks, dtype=torch.int).view(-1, width)
    names = (_named(HOSTS, cross), _named(RANKS, node))
    return DeviceMesh.from_group([cross, node], device_type, mesh=ranks, mesh_dim_names=names)


def _named(dimension: str, group: dist.ProcessGroup) -> str:
    return f"{dimension}_{group.group_name}"


# Outputs of units that are views, as that of `nn.Linear` for three dimensions is: no operation in place on
# them.
def protect_views(unit: nn.Module) -> None:
    """Let views that `unit`, which went through `fully_shard`, returns refuse operations in place."""
    unit.register_forward_hook(_before_hook, prepend=True)
    unit.register_forward_hook(_after_hook)


class _Alias(torch.autograd.Function):
    """The same numbers in the same memory, with the same version counter, as a tensor that is no view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return grad_outputs[0]


class _Guarded(torch.autograd.Function):
    """Its input: a view, for autograd, that is not to be changed in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return grad_outputs[0]


def _before_hook(unit: nn.Module, arguments: Any, output: Any) -> Any:
    return _changed(output, lambda tensor: tensor._base is not None, _Alias)


def _after_hook(unit: nn.Module, arguments: Any, output: Any) -> Any:
    backward: Any = _Alias
    return _changed(output, lambda tensor: isinstance(tensor.grad_fn, backward._backward_cls), _Guarded)


def _changed(output: Any, is_meant: Any, function: Any) -> Any:
    """Return `output` with `function` on the tensors that are meant; None, so as it is, where there is none."""
    leaves, form = tree_flatten(output)
    meant = [isinstance(each, torch.Tensor) and each.requires_grad and is_meant(each) for each in leaves]
    if not torch.is_grad_enabled() or not any(meant):
        return None
    pairs = zip(leaves, meant, strict=True)
    return tree_unflatten([function.apply(each) if chosen else each for each, chosen in pairs], form)


# What frozen weights store, for FSDP2: parameters of modules that are in the model while it is sharded.
_NAME = "_farandole_stored_"


@contextmanager
def stored_parts_shown(model: nn.Module) -> Iterator[None]:
    """Let `fully_shard` see the stored tensors of frozen weights as parameters of the layers that have them.

    The names of the model are the old ones afterwards. See [Note: parts in shards] in `parallel.frozen_weight`.
    """
    shown: list[tuple[nn.Module, str]] = []
    seen: set[int] = set()
    for module in list(model.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, FrozenWeight) and id(weight) not in seen:
                seen.add(id(weight))
                module.add_module(_NAME + name, weight.to_module())
                shown.append((module, _NAME + name))
    try:
        yield
    finally:
        for module, name in shown:
            del module._modules[name]


class FullySharded(Strategy):
    """Stage 3: parameters, gradients and states in shards. Experts, and parameters of other stages, stay whole."""

    takes_own_parameters = True

    def is_asked(self) -> bool:
        """At stage 3, where there are several ranks."""
        return self.plan.zero == MOST_ZERO and self.mesh.here.size > 1

    def check(self) -> None:
        """Raise `ConfigError` for a module, parameter or optimizer that cannot be sharded, by name."""
        _check_shardable(self.mesh.replicas, self.model, self.optimizers, self.plan, self.mesh.copies)

    def apply(self) -> None:
        """Shard what this rank has, where other ranks have the same."""
        if self.mesh.replicas.size == 1:
            return
        named = self.distributed.parameters_here(self.model)
        own = {each for _, each in named if not is_of_expert(each)}
        others = [each for each in self.model.parameters() if each not in own]
        sharded = shard_parameters(
            self.mesh.replicas, self.model, self.optimizers, self.plan, copies=self.mesh.copies, leave=others
        )
        if self.call.after_sharding is not None:
            self.call.after_sharding()
        vars(self.model)["_farandole_sharded"] = self.distributed.sharded = sharded
        self.distributed.exchange = sharded


def _check_shardable(
    here: World, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, copies: int
) -> None:
    refuse_unshardable(here, model)
    support_fused(optimizers)
    units = _units(model)
    inside = {id(parameter) for _, unit in units for parameter in unit.parameters()}
    narrowed = set(narrowable(model)) if plan.bf16_parameters else set()
    for name, unit in units:
        refuse_mixed_types(name, list(unit.named_parameters(name)), narrowed)
    refuse_mixed_types("", [(n, p) for n, p in model.named_parameters() if id(p) not in inside], narrowed)
    if here.size > 1:
        refuse_by_trial(optimizers, make_mesh(here, plan, here.device.type, copies))


def shard_parameters(
    here: World,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    plan: Plan,
    *,
    copies: int = 1,
    leave: Collection[nn.Parameter] = (),
) -> ShardedModel:
    """Shard `model`, which is the same on all ranks, and let `optimizers` step with the shards.

    `leave`: parameters that stay as they are: experts, and those of other stages.
    To be called by all ranks, when it is known that it can be. Names stay; the model's class becomes a subclass.

    Raises:
        PlanError: the plan does not fit the hosts of this world.
    """
    buffers = BufferSync(here, model) if plan.buffers == "mean" else None
    mesh = make_mesh(here, plan, here.device.type, copies)
    before = dict(model.named_parameters())
    left = set(leave)
    units = [(name, unit) for name, unit in _units(model) if not left.issuperset(unit.parameters())]
    # These have no memory of their own: what they store is sharded, and by a codec of parameters nothing else is.
    whole: set[nn.Parameter] = {each for each in model.parameters() if isinstance(each, FrozenWeight)} | left
    is_coded = plan.weight_codec != NONE
    with warnings.catch_warnings(), nullcontext() if is_coded else stored_parts_shown(model):
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of its older names
        for _, unit in units:
            fully_shard(unit, mesh=mesh, ignored_params=whole)
        root: Any = fully_shard(model, mesh=mesh, ignored_params=whole)
    if not hasattr(root, "set_reduce_scatter_unused_params"):
        raise PlanError(f"plan: zero = 3 needs torch 2.13 or newer, and this is {torch.__version__}")
    for unit in (root, *(unit for _, unit in units)):
        protect_views(unit)
    if here.device.type == "cpu":
        _prefetch(root, [unit for _, unit in units])
    after = dict(model.named_parameters())
    shards: dict[torch.Tensor, torch.Tensor] = {before[name]: after[name] for name in before}
    for source, target in shards.items():
        carry_marks(source, target)
        if isinstance(target, DTensor):
            _place_gradients(target)
    for each in optimizers:
        move_to_shards(each, shards)
        if left:
            StepOneByOne(here).install(each)
    _encode(here, root, plan, mesh.size(-1))
    return ShardedModel(here, model, plan, buffers)


def _place_gradients(parameter: DTensor) -> None:
    """Let gradients of what the loss adds (a penalty) be shards: torch leaves some whole, as those of sums."""
    mesh, placements, trains = parameter.device_mesh, parameter.placements, parameter.requires_grad

    def place(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.redistribute(mesh, placements) if isinstance(gradient, DTensor) else gradient

    parameter.requires_grad_(True).register_hook(place)
    parameter.requires_grad_(trains)


def _prefetch(root: Any, units: Sequence[Any]) -> None:
    """Gather a unit while the one before it runs. See [Note: the next unit]."""
    root._set_unshard_async_op(True)
    for each, following in zip([root, *units], units, strict=False):
        each.set_modules_to_forward_prefetch([following])


def _encode(here: World, model: Any, plan: Plan, shards: int) -> None:
    """Let units travel by the codecs of the plan."""
    gradients, weights = CodecSpec.parse(plan.codec), CodecSpec.parse(plan.weight_codec)
    packer = packer_of(weights)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            if packer is not None:
                unit.set_custom_all_gather(CodedAllGather(here, packer))
            if not gradients.is_exact:
                unit.set_custom_reduce_scatter(CodedReduceScatter(here, gradients, shards))


def _units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks that are gathered and freed on their own. See [Note: what is one unit]."""
    blocks = [
        (name, block) for name, block in repeated_blocks(model)
        if type(block).forward is not nn.Module.forward and block is not model
    ]  # fmt: skip
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    units = []
    for name, block in blocks:
        everywhere = [each for parameter in block.parameters() for each in names[id(parameter)]]
        if all(each.startswith(f"{name}.") for each in everywhere):
            units.append((name, block))
    return units


# What stage 3 cannot shard, said by name before anything changes: modules, parameters, sparse layers.


def refuse_unshardable(here: World, model: nn.Module) -> None:
    """Raise `ConfigError` for a model that torch's `fully_shard` would not take, or would train otherwise."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)) and type(model).forward is nn.Module.forward:
        raise ConfigError(
            f"zero = 3: the model is a {type(model).__name__}, which has no forward pass to gather parameters for",
            remedy="give one torch.nn.Module whose forward calls the parts",
        )
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ConfigError(
                f"zero = 3: {_place(name)} went through fully_shard already",
                remedy="leave fully_shard out; distribute does what it does",
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"zero = 3: {_place(name)} gives sparse gradients, which cannot be sharded",
                remedy="make it with sparse=False, or use zero = 0",
            )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, FrozenWeight):
            _refuse_parameter(here, name, parameter)


def _refuse_parameter(here: World, name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise ConfigError(
            f"zero = 3: parameter {name!r} is a DTensor already", remedy="give a model with plain parameters"
        )
    if type(parameter) is not nn.Parameter:
        raise ConfigError(
            f"zero = 3: parameter {name!r} is a {type(parameter).__name__}, expected a plain torch.nn.Parameter",
            remedy="use zero = 0, or replace it by a plain parameter",
        )
    if parameter.dim() == 0:
        raise ConfigError(
            f"zero = 3: parameter {name!r} has no dimension to shard along",
            remedy=f"make it a tensor of one element: torch.nn.Parameter({name.rpartition('.')[2]}.reshape(1))",
        )
    if parameter.is_complex():
        raise ConfigError(
            f"zero = 3: parameter {name!r} is complex, which fully_shard does not reduce",
            remedy="keep real and imaginary parts (torch.view_as_real), or use zero = 0",
        )
    if not parameter.is_contiguous():
        raise ConfigError(
            f"zero = 3: parameter {name!r} of shape {tuple(parameter.shape)} is not contiguous (strides "
            f"{parameter.stride()})",
            remedy="call model.to(memory_format=torch.contiguous_format) before distribute",
        )
    if parameter.device.type != here.device.type:
        raise ConfigError(
            f"zero = 3: parameter {name!r} is on {parameter.device}, and this rank's device is {here.device}",
            remedy="move the whole model to farandole.world().device before distribute",
        )


def refuse_mixed_types(
    name: str, parameters: Sequence[tuple[str, nn.Parameter]], narrowed: Collection[nn.Parameter]
) -> None:
    """Raise `ConfigError` where trained parameters that travel together have several types.

    `narrowed`: the parameters that will be bfloat16, by the plan key `bf16_parameters`.
    """
    first: dict[torch.dtype, str] = {}
    for label, parameter in parameters:
        if parameter.requires_grad:
            first.setdefault(torch.bfloat16 if parameter in narrowed else parameter.dtype, label)
    if len(first) > 1:
        shown = ", ".join(f"{label!r} is {str(dtype).removeprefix('torch.')}" for dtype, label in first.items())
        remedy = "convert the model to one type and use torch.autocast for others"
        if narrowed:
            shown += " (bf16_parameters leaves normalisations with running statistics in float32)"
            remedy = "set zero = 2, leave bf16_parameters out, or use LayerNorm or GroupNorm"
        raise ConfigError(
            f"zero = 3: parameters of {_place(name)} have several types, and are reduced together: {shown}",
            remedy=remedy,
        )


def _place(name: str) -> str:
    return f"module {name!r}" if name else "the model"


# An optimizer whose parameters become sharded: it steps with the shards from then on, and keeps what it had.


def refuse_by_trial(optimizers: Sequence[Optimizer], mesh: DeviceMesh) -> None:
    """Raise `ConfigError` for an optimizer whose step is another one with tensors that are sharded over `mesh`.

    A norm or a mean by torch's operations is that of the whole parameter there.
    """
    for i, each in enumerate(optimizers):
        why = why_not_sharded(each, mesh)
        if why:
            raise ConfigError(
                f"zero = 3 shards parameters, and the work of optimizer {i}, a {type(each).__name__}, cannot be "
                f"divided so: {why}",
                remedy="use one that works element by element, such as torch.optim.AdamW, or set zero = 0; norms "
                "by torch's operations are right if their value stays a tensor",
            )


def support_fused(optimizers: Sequence[Optimizer]) -> None:
    """Let torch's sharded tensors take the fused steps that they do not know: those of SGD and Adagrad.

    They work element by element, as that of Adam does, which is known there.

    Raises:
        ConfigError: this torch cannot be told.
    """
    for each in optimizers:
        step = _FUSED_STEPS.get(type(each))
        if step is None or not any(group.get("fused") for group in each.param_groups):
            continue
        try:
            from torch.distributed.tensor._ops._pointwise_ops import _register_single_dim_pointwise

            if step not in _known:
                _register_single_dim_pointwise(step)
                _known.append(step)
        except (ImportError, AttributeError, TypeError):
            raise ConfigError(
                f"zero = 3: the fused step of {type(each).__name__} takes no sharded tensors in torch "
                f"{torch.__version__}",
                remedy="make the optimizer without fused=True",
            ) from None


_FUSED_STEPS: dict[Any, Any] = {
    torch.optim.SGD: torch.ops.aten._fused_sgd_.default,
    torch.optim.Adagrad: torch.ops.aten._fused_adagrad_.default,
}
_known: list[Any] = []


@torch.no_grad()
def move_to_shards(optimizer: Optimizer, shards: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Let `optimizer` step with `shards`, by the parameter that each is of; its state is cut as they are.

    Groups keep their order and options. State tensors of a parameter's shape are sharded like it; others (a step
    count) stay as they are, equal on all ranks.
    """
    for group in optimizer.param_groups:
        group["params"] = [shards.get(parameter, parameter) for parameter in group["params"]]
    for parameter in [key for key in optimizer.state if key in shards]:
        shard = shards[parameter]
        entries: Any = optimizer.state.pop(parameter)
        optimizer.state[shard] = {name: _cut(value, shard) for name, value in entries.items()}


class StepOneByOne:
    """Hooks around the steps of an optimizer that has sharded parameters and whole ones, such as experts.

    The steps of torch for many parameters at once (``foreach``, ``fused``) take one kind of tensor. Groups with
    both kinds have these options off during a step alone: other stages of a pipeline may have one kind, and what
    is saved is to be the same on all ranks.
    """

    def __init__(self, here: World) -> None:
        self._here = here
        self._asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._is_said = False

    def install(self, optimizer: Optimizer) -> None:
        """Surround the steps of `optimizer`."""
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)
        undo_after_errors(optimizer, self.after)

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """See `torch.optim.Optimizer.register_step_pre_hook`."""
        if is_nested_step(optimizer):
            return
        for group in optimizer.param_groups:
            options = {key: group[key] for key in ("foreach", "fused") if group.get(key, False) is not False}
            if options and len({isinstance(each, DTensor) for each in group["params"]}) > 1:
                self._asked.append((group, options))
                group.update(dict.fromkeys(options, False))
        asked = sorted({key for _, options in self._asked for key, value in options.items() if value})
        if asked:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if asked and not self._is_said and self._here.rank == 0:
            self._is_said = True
            write_notice(
                f"zero = 3: {type(optimizer).__name__} updates one parameter after the other, without "
                f"{' and '.join(asked)}: its groups have sharded parameters and whole ones (experts)"
            )

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """See `torch.optim.Optimizer.register_step_post_hook`."""
        if not is_nested_step(optimizer):
            for group, options in self._asked:
                group.update(options)
            self._asked = []


def _cut(value: Any, shard: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(shard, DTensor) or value.shape != shard.shape:
        return value
    # No message: every rank has rank 0's state already, and takes its part.
    cut = distribute_tensor(value.detach(), shard.device_mesh, shard.placements, src_data_rank=None)
    return cut.detach().clone()  # the whole tensor is given back
