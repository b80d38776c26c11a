"""The forward pass in lower precision: autocast around the model's own, outputs in float32.

The parameters stay as they are (master weights in float32); `torch.autocast` casts what enters matrix products and
convolutions. The loss is computed by the loop, outside of it, from outputs in float32, as with Accelerate.
See [Note: borders] in `loss_scaling` for float16.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.world.world import World
from ..core.vocabulary.errors import ConfigError, PlanError
from .changed_class import (
    ChangedClass,
    change_class,
    is_transposed,
    make_kin,
    plain_class_of,
    require_changeable,
    set_class,
)
from .loss_scaling import (
    DynamicLossScale,
    Entering,
    Leaving,
    agree_finite,
    all_finite,
    hook_parameter,
    scaled_parameters,
    sequence_number,
    strange_leaves,
)
from .model import DistributedModel, Strategy

# Containers of tensors, rebuilt with other tensors: the arguments and the output of a forward pass.


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with `change` applied to each tensor in it; what holds none is returned as it is.

    Goes through lists, tuples, named tuples, mappings and dataclasses. Other objects are left alone.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(part, change) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return _map_mapping(value, change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, change)
    return value


def _map_mapping(value: Mapping[Any, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = {}
    for key, part in value.items():
        new = map_tensors(part, change)
        if new is not part:
            changed[key] = new
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return {**value, **changed}
    result = copy.copy(value)
    for key, part in changed.items():
        result[key] = part
    return result


def _map_dataclass(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name, None)
        new = map_tensors(part, change)
        if new is not part:
            changed[field.name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, part in changed.items():
        object.__setattr__(result, name, part)  # it may be frozen
    return result


# Which casts of weights autocast keeps, and for how long.
#
# Autocast keeps the cast of a weight until its outermost context ends, so that a weight used twice is cast once.

_sharing: list[str] = []
"""The devices of the `shared_casts` that are open."""


@contextmanager
def shared_casts(device: str) -> Iterator[None]:
    """Let passes under autocast that begin inside use one cast of each weight: micro-batches of one step.

    Their graphs keep it until backward, and without this each would keep a copy of its own. No weight may change
    inside. The context is that of the caller: whether autocast is on stays as it is.
    """
    _sharing.append(device)
    try:
        is_on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        with torch.autocast(device, dtype=dtype, enabled=is_on, cache_enabled=torch.is_autocast_cache_enabled()):
            yield
    finally:
        _sharing.pop()


@contextmanager
def own_casts() -> Iterator[None]:
    """Let casts that are made inside end with it, though autocast goes on.

    Where they are shared, none is kept at all, because torch drops all or none: a weight is cast at each use then.
    """
    before = torch.is_autocast_cache_enabled()
    if _sharing:
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        if not _sharing:
            torch.clear_autocast_cache()


# The weights that autocast casts and that nothing else uses: those of matrix products, by their layers.

OF_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Weights of `nn.MultiheadAttention` itself; it reads that of its last layer, too, and does not call that."""
_PRODUCTS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip

Users = Mapping[nn.Parameter, list[tuple[nn.Module, str]]]


def product_weights(model: nn.Module) -> Users:
    """Return the float32 weights of linear layers and convolutions, each with its layers and its name there.

    What counts is the class, torch's own or transformers' Conv1D: of any other it is not known what it does. A
    weight that another module has too is left out.
    """
    attention = [each for each in model.modules() if plain_class_of(each) is nn.MultiheadAttention]
    last = {id(each.out_proj) for each in attention}
    users: WeakIdKeyDictionary = WeakIdKeyDictionary()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append((module, name))
    return {
        each: known
        for each, known in users.items()
        if each.dtype == torch.float32 and all(_is_product(module, name, last) for module, name in known)
    }


def _is_product(module: nn.Module, name: str, last_of_attention: set[int]) -> bool:
    kind = plain_class_of(module)
    if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
        return False
    if kind is nn.MultiheadAttention:
        return name in OF_ATTENTION
    is_last = kind is NonDynamicallyQuantizableLinear and id(module) in last_of_attention
    return name == "weight" and (kind in _PRODUCTS or is_transposed(module) or is_last)


_ATTRIBUTE = "_farandole_precision"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Run = Callable[[Callable[..., Any], Any, Any], Any]
"""Runs a forward pass with positional and named arguments."""
_HALVES = (torch.bfloat16, torch.float16)


class Cast(ChangedClass):
    """The first base of a kin whose forward pass runs in lower precision."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the user's forward pass by the `LowerPrecision` of this very object; a copy's is the plain one."""
        plain = super().forward
        passes = vars(self).get(_ATTRIBUTE)
        if passes is None or not passes.is_of(self):
            return plain(*arguments, **named)
        if passes.scale is not None:
            return passes.run_scaled(plain, arguments, named)
        return passes.run(plain, arguments, named)


class LowerPrecision:
    """The forward passes of one distributed model, and in float16 the scale of its gradients."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        optimizers: Sequence[Optimizer],
        here: World,
        *,
        shards: bool,
        exchanges: bool,
    ) -> None:
        """`shards`: each rank looks at a part of the gradients. `exchanges`: other ranks have them too."""
        self._dtype = dtype
        self.scale = DynamicLossScale() if dtype == torch.float16 else None
        """None: gradients are not scaled."""
        self._modules: list[weakref.ref[nn.Module]] = []
        self._parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary(dict.fromkeys(model.parameters()))
        """The parameters, and their stand-ins that were met."""
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._in_one_process = not exchanges
        """Then no exchange tells when gradients are complete."""
        self._agrees_in = here if shards else None
        self.stand_ins: Callable[[], Sequence[torch.Tensor]] = list
        """Returns what the modules compute with instead of parameters that are sharded, as far as it is known."""
        self._handles: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._depth = 0
        self._is_checked = False
        self._task = -1
        # No graph of ``torch.compile`` holds the scale, which changes; the model's own forward pass is compiled.
        self.run_scaled: Run = torch.compiler.disable(self._run_scaled, recursive=False)

    def start(self, modules: Sequence[nn.Module]) -> None:
        """Run the forward passes of `modules` in lower precision from now on."""
        for module in modules:
            kind: Any = type(module)
            vars(module)[_ATTRIBUTE] = self
            change_class(module, make_kin(Cast, kind), "plan: precision")
            self._modules.append(weakref.ref(module))
        if self.scale is not None:
            scaled_parameters.add([each for ref in self._parameters if (each := ref()) is not None], self.scale)
            self._hook_parameters()

    def stop(self) -> None:
        """Undo `start`."""
        for ref in self._modules:
            module = ref()
            if module is not None:
                vars(module).pop(_ATTRIBUTE, None)
                if isinstance(module, Cast):
                    set_class(module, module.plain_class)
        for handle in self._handles.values():
            handle.remove()
        scaled_parameters.remove(list(self._known))

    def is_of(self, module: nn.Module) -> bool:
        """Return whether `module` is the object it was made for, and no copy of it."""
        return any(ref() is module for ref in self._modules)

    # -- a pass ------------------------------------------------------------------------------------

    def run(self, plain: Callable[..., Any], arguments: Any, named: Any) -> Any:
        """Run the forward pass under autocast, and return its output in float32."""
        with torch.autocast(self._device_type(), dtype=self._dtype):
            output = plain(*arguments, **named)
        return map_tensors(output, _widen)

    def _run_scaled(self, plain: Callable[..., Any], arguments: Any, named: Any) -> Any:
        """Do the same, and scale the gradients inside of it."""
        scale = self.scale
        if scale is None or self._depth or not torch.is_grad_enabled():
            return self.run(plain, arguments, named)
        self._hook_parameters()
        arguments, named = map_tensors((arguments, named), partial(_leave, scale))
        begin = sequence_number()
        self._depth += 1
        try:
            output = self.run(plain, arguments, named)
        finally:
            self._depth -= 1
        self._hook_stand_ins(scale)
        leaving: list[torch.Tensor] = []

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            leaving.append(tensor)
            # FSDP2 hooks outputs, and a view that is changed afterwards would lose that hook.
            entered: torch.Tensor = Entering.apply(tensor, scale, begin, self.stand_ins is not list)
            return entered

        output = map_tensors(output, enter)
        if not self._is_checked:
            self._is_checked = True
            self._refuse_strangers(leaving)
        return output

    def _device_type(self) -> str:
        parameters = (each for ref in islice(self._parameters, 1) if (each := ref()) is not None)
        return next((each.device.type for each in parameters), "cpu")

    def _hook_parameters(self) -> None:
        scale = self.scale
        if scale is None or len(self._handles) == len(self._parameters):
            return
        for ref in self._parameters:
            parameter = ref()
            if parameter is not None and parameter.requires_grad and parameter not in self._handles:
                first = self._note_pass if self._in_one_process else _nothing
                self._handles[parameter] = hook_parameter(parameter, scale, first)

    def _hook_stand_ins(self, scale: DynamicLossScale) -> None:
        """After a forward pass: treat what parameters were gathered into as the parameters."""
        for each in self.stand_ins():
            if each not in self._known:
                self._known[each] = None
                scaled_parameters.add([each], scale)
            if each.requires_grad and each not in self._handles:
                self._handles[each] = hook_parameter(each, scale, _nothing)

    def _refuse_strangers(self, outputs: Sequence[torch.Tensor]) -> None:
        shapes = strange_leaves(outputs, self._known)
        if shapes:
            raise ConfigError(
                f'plan: precision = "fp16": the forward pass uses {len(shapes)} tensors that require a '
                f"gradient and are neither inputs nor parameters (shapes {', '.join(map(str, shapes[:3]))})",
                remedy='register them as parameters, or use precision = "bf16"',
            )

    # -- gradients; see [Note: one decision] in `loss_scaling` ---------------------------------------

    def _note_pass(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.look_at_gradients)

    def look_at_gradients(self) -> None:
        """Look whether the gradients are finite; called when they are complete, on all ranks alike."""
        self._task = -1
        if self.scale is None:
            return
        self.scale.pass_ends()
        optimizers = [ref() for ref in self._optimizers]
        found = list(map(_finite, optimizers))
        if self._agrees_in is not None:
            found = agree_finite(self._agrees_in, found)
        for optimizer, finite in zip(optimizers, found, strict=True):
            if optimizer is not None:
                self.scale.note_finite(id(optimizer), finite)


class MixedPrecision(Strategy):
    """The plan's `precision`: the forward passes of the model, or of what a list holds, in lower precision."""

    keys = ("precision",)

    def check(self) -> None:
        """Raise `PlanError` where it would have no effect, or trained parameters are no master weights."""
        self._modules = _modules_to_cast(self.model, self.plan.precision, narrow=self.plan.bf16_parameters)

    def apply(self) -> None:
        """Run them so from now on."""
        if not self._modules:
            return
        mesh, dtype = self.mesh, DTYPES[self.plan.precision]
        divides = mesh.here.size > 1 and (self.plan.zero > 0 or not mesh.degrees.is_data_alone)
        passes = self.distributed.passes = LowerPrecision(
            self.model, dtype, self.optimizers, mesh.here, shards=divides, exchanges=mesh.replicas.size > 1
        )
        passes.start(self._modules)


def _modules_to_cast(model: nn.Module, precision: str, *, narrow: bool) -> list[nn.Module]:
    parameters = list(model.named_parameters())
    half = [name for name, each in parameters if each.requires_grad and each.dtype in _HALVES]
    if half and not narrow:
        raise PlanError(
            f"plan: precision = {precision!r} keeps master weights in float32, but parameter {half[0]!r} (and "
            f"{len(half) - 1} more) is in lower precision already",
            remedy="give the model in float32, or leave precision out",
        )
    if not narrow and not any(each.dtype == torch.float32 for _, each in parameters):
        raise PlanError(
            f"plan: precision = {precision!r} has no effect: no parameter of {type(model).__name__} is float32",
            remedy="leave precision out",
        )
    modules = _callable(model)
    for module in modules:
        require_changeable(module, f"plan: precision = {precision!r}")
    return modules


def loss_scale_of(model: nn.Module) -> DynamicLossScale | None:
    """Return the loss scale of a distributed model; None where gradients are not scaled."""
    passes = DistributedModel.of(model).passes
    return None if passes is None else passes.scale


def _callable(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that can be called; an `nn.ModuleList` cannot."""
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        return [module]
    return list({id(found): found for child in module.children() for found in _callable(child)}.values())


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _leave(scale: DynamicLossScale, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    left: torch.Tensor = Leaving.apply(tensor, scale)
    return left


def _finite(optimizer: Optimizer | None) -> torch.Tensor | None:
    """Return whether this rank's gradients of an optimizer are finite; None: it has none."""
    groups = [] if optimizer is None else optimizer.param_groups
    found = [each.grad for group in groups for each in group["params"] if each.grad is not None]
    return all_finite(found) if found else None


def _nothing() -> None:
    return None
