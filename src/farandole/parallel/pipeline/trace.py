"""Record the program of a model's forward pass, by one pass on a micro-batch. See [Note: what a program is].

Modules are called whole, except the model itself, sequences, and modules around repeated blocks: their code is
recorded. Python decisions in that code which depend on computed values are refused, naming the line.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from ...core.vocabulary.errors import PlanError
from ..blocks import repeated_blocks
from .program import Held, Program, ProgramCall, Value, ValueSpec

_DECISIONS = {
    "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "item", "tolist", "numpy",
    "__array__", "equal", "allclose", "is_nonzero",
}  # fmt: skip
"""Functions that make Python values of what is in a tensor."""
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format,
    torch.layout, slice, type(Ellipsis), range, type,
)  # fmt: skip

Answer = Callable[..., Any]
"""(name, module, arguments): calls a module, here or where it is."""


def traced_through(model: nn.Module, cuts: Sequence[str] = ()) -> set[nn.Module]:
    """Return the modules whose own code is recorded; others are called whole. `cuts`: names that are called."""
    blocks = [name for name, _ in repeated_blocks(model)]
    inside = {""}
    for name in (*blocks, *cuts):
        parts = name.split(".")
        inside.update(".".join(parts[:i]) for i in range(len(parts)))
    found = {module for name, module in model.named_modules() if name in inside}
    return found | {
        child for module in found for child in _sequences(module, {model.get_submodule(b) for b in blocks})
    }


def _sequences(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) is nn.Sequential and child not in blocks:
            yield child
            yield from _sequences(child, blocks)


def trace(
    model: nn.Module,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
    through: set[nn.Module],
    *,
    answer: Answer | None = None,
    stand_in: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: None,
) -> tuple[Program, Any]:
    """Run ``model(*arguments, **named)`` without gradients; return its program and what it returned.

    `answer` calls the modules. `stand_in` gives a tensor instead of a parameter that is not here.
    Raises `PlanError` where the code cannot be recorded.
    """
    recording = _Recording(model, through, answer or _call, stand_in)
    recording.begin((arguments, named))
    with torch.no_grad(), _no_cache(model), recording.calls_of_modules(), recording:
        output = model.forward(*arguments, **named)
    return recording.end(output), output


class _Recording(TorchFunctionMode):
    def __init__(
        self,
        model: nn.Module,
        through: set[nn.Module],
        answer: Answer,
        stand_in: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> None:
        super().__init__()
        self._model, self._through, self._answer, self._stand_in = model, through, answer, stand_in
        self._names = {id(module): name for name, module in model.named_modules()}
        self._held: dict[int, Held] = {}
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            self._held[id(tensor)] = Held(name)
        self._values: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        """Objects whose ids are keys above."""
        self._shared: set[int] = set()
        self._program = Program(0, [], None, [])
        self._is_inside = False

    def begin(self, inputs: Any) -> None:
        """Number the tensors among `inputs`."""
        for leaf in pytree.tree_leaves(inputs):
            if isinstance(leaf, torch.Tensor):
                self._shared.add(self._new_value(leaf, trains=False))
        self._program.inputs = len(self._program.specs)

    def end(self, output: Any) -> Program:
        """Return the program, whose output is `output`."""
        self._program.output = self._mark(output, "the output of forward")
        return self._program

    # -- calls -------------------------------------------------------------------------------------

    @contextmanager
    def calls_of_modules(self) -> Iterator[None]:
        """Record calls of modules inside."""
        plain = nn.Module.__call__

        def call(module: nn.Module, *arguments: Any, **named: Any) -> Any:
            name = self._names.get(id(module))
            if self._is_inside or name is None or module in self._through:
                return plain(module, *arguments, **named)
            run = partial(self._answer, name, module)
            return self._record(name, None, arguments, named, run=run, module=module)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = plain  # type: ignore[method-assign]

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if self._is_inside:
            return func(*args, **named)
        name = getattr(func, "__name__", str(func))
        if name in _DECISIONS:
            return self._decide(name, func, args, named)
        if name == "__get__" or name.startswith("__set__"):
            result = func(*args, **named)
            if not isinstance(result, torch.Tensor) or id(result) in self._values or id(result) in self._held:
                return result
        text = resolve_name(func) or name
        return self._record(text, func, args, named, run=func)

    def _record(
        self,
        target: str,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        named: dict[str, Any],
        *,
        run: Callable[..., Any],
        module: nn.Module | None = None,
    ) -> Any:
        marked = self._mark((args, named), f"an argument of {target!r}")
        tensors = [leaf for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
        versions = [_version(tensor) for tensor in tensors]
        real_args, real_named = pytree.tree_map(self._real, (args, named))
        random = torch.get_rng_state()
        self._is_inside = True
        try:
            result = run(*real_args, **real_named)
        finally:
            self._is_inside = False
        leaves = pytree.tree_leaves(result)
        mutated = self._mutated(tensors, versions)
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if function is not None and not has_tensors and (result is not None or not mutated):
            return result  # a shape, a flag: no call of the program
        call = ProgramCall(target, function, marked, ())
        reads, holds = call.reads(), call.holds()
        call.is_shared = (
            function is not None and not mutated and not holds
            and all(number in self._shared for number in reads)
            and torch.equal(random, torch.get_rng_state())
        )  # fmt: skip
        trains = self._trains(call, module)
        numbers: list[int | None] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                numbers.append(None)
                continue
            number = self._new_value(leaf, trains=trains and leaf.is_floating_point())
            numbers.append(number)
            if call.is_shared:
                self._shared.add(number)
        call.results = tuple(numbers)
        values = iter(numbers)
        call.form = pytree.tree_map(lambda leaf: leaf if (at := next(values)) is None else Value(at), result)
        call.renames = tuple(self._rename(tensor, trains) for tensor in mutated)
        self._program.calls.append(call)
        return result

    def _trains(self, call: ProgramCall, module: nn.Module | None) -> bool:
        if any(self._program.specs[number].trains for number in call.reads()):
            return True
        if module is not None:
            return any(parameter.requires_grad for parameter in module.parameters())
        parameters = dict(self._model.named_parameters())
        return any(name in parameters and parameters[name].requires_grad for name in call.holds())

    def _mutated(self, tensors: list[torch.Tensor], versions: list[int]) -> list[torch.Tensor]:
        """Return the values that were changed in place, views of the same memory among them."""
        # By the storage, not by its address: fake tensors have none.
        changed = {
            tensor.untyped_storage()._cdata
            for tensor, before in zip(tensors, versions, strict=True)
            if id(tensor) in self._values and _version(tensor) != before
        }
        if not changed:
            return []
        return [tensor for tensor in self._kept if tensor.untyped_storage()._cdata in changed]

    def _rename(self, tensor: torch.Tensor, trains: bool) -> tuple[int, int]:
        before = self._values[id(tensor)]
        return before, self._new_value(tensor, trains=trains or self._program.specs[before].trains)

    def _decide(self, name: str, func: Callable[..., Any], args: Any, named: Any) -> Any:
        """A Python value of what is in a tensor: kept as a guard if it is of the inputs, and refused otherwise."""
        result = func(*args, **named)
        tensors = [leaf for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            number = self._values.get(id(tensor))
            if number is None and id(tensor) not in self._held:
                continue
            if number is None or number not in self._shared or len(tensors) > 1 or not _is_plain(result):
                raise PlanError(
                    f"pipeline: {_user_line()} decides by what is in a tensor ({name} of a {tuple(tensor.shape)} "
                    "tensor), and the model is cut there",
                    remedy="move that code into a module that is called whole, or compute without the decision",
                )
            self._program.guards.append((number, name, result))
        return result

    # -- values ------------------------------------------------------------------------------------

    def _new_value(self, tensor: torch.Tensor, *, trains: bool) -> int:
        number = len(self._program.specs)
        if id(tensor) not in self._values:
            self._kept.append(tensor)
        self._values[id(tensor)] = number
        self._program.specs.append(ValueSpec(tuple(tensor.shape), tensor.dtype, trains))
        return number

    def _mark(self, nest: Any, where: str) -> Any:
        return pytree.tree_map(lambda leaf: self._mark_one(leaf, where), nest)

    def _mark_one(self, leaf: Any, where: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in self._values:
                return Value(self._values[id(leaf)])
            if id(leaf) in self._held:
                return self._held[id(leaf)]
            if leaf.requires_grad:
                raise PlanError(
                    f"pipeline: {where} at {_user_line()} is a tensor with gradients from outside of the model",
                    remedy="give it to the model as an input or a parameter",
                )
            return leaf
        if isinstance(leaf, _PLAIN) or callable(leaf) or isinstance(leaf, torch.Generator) or _is_enum(leaf):
            return leaf
        raise PlanError(
            f"pipeline: {where} at {_user_line()} is a {type(leaf).__qualname__}, which stages cannot share",
            remedy="pass tensors, numbers, or tuples, lists and dicts of them between modules",
        )

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            there = self._stand_in(leaf)
            return leaf if there is None else there
        return leaf


def _call(_: str, module: nn.Module, *arguments: Any, **named: Any) -> Any:
    return module(*arguments, **named)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_plain(result: Any) -> bool:
    return isinstance(result, (bool, int, float))


def _is_enum(leaf: Any) -> bool:
    return hasattr(type(leaf), "__members__")


@contextmanager
def _no_cache(model: nn.Module) -> Iterator[None]:
    """Let a model of transformers fill no cache of keys, which is for generating."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False) is not True:
        yield
        return
    config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        config.use_cache = True  # type: ignore[union-attr]


def _user_line() -> str:
    """Return the place in the code of the model that is running."""
    ours = __name__.partition(".")[0]
    for frame in reversed(traceback.extract_stack(sys._getframe(1))):
        name = frame.filename.replace("\\", "/")
        if f"/{ours}/" not in name and "/torch/" not in name and "contextlib" not in name:
            return f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"
    return "an unknown line"
