"""The user's functions that a command line names: found, called, and their errors with file and line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from ...core.vocabulary.errors import ConfigError, FarandoleError
from ...core.vocabulary.text import did_you_mean
from ...parallel.blocks import repeated_blocks
from ...parallel.lower_precision import own_casts
from ...parallel.pipeline.micro_batches import as_call

_OWN = str(Path(__file__).parents[2])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def load_function(text: str, *, what: str) -> Callable[..., Any]:
    """Return the function that `text` names: ``module:function`` or ``path/file.py:function``.

    Modules are also found in the working directory. `what` is how an error names the argument, e.g. ``--loss``.
    Raises `ConfigError` if there is no such function, or its module fails to import.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(
            f"{what} {text!r}: expected a function as module:function or file.py:function",
            remedy="for example train:make_model, with make_model() in train.py",
        )
    with errors_of_user(f"{what} {text!r}: importing {place}"):
        module = _load_file(Path(place), what) if place.endswith(".py") else _load_module(place, what)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [each for each, value in vars(module).items() if callable(value) and each[0] != "_"]
            raise ConfigError(f"{what} {text!r}: {place} has no {part!r}", remedy=did_you_mean(name, known))
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{what} {text!r}: {name} is {type(found).__name__}, expected a function")
    function: Callable[..., Any] = found
    return function


@contextlib.contextmanager
def errors_of_user(doing: str) -> Iterator[None]:
    """Turn what the user's code raises into a `ConfigError` that names its file and line; keep stdout clean."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except FarandoleError:
            raise
        except SystemExit as error:
            raise ConfigError(
                f"{doing} ended the program: SystemExit({error.code!r}){_place(error)}",
                remedy='put what trains behind: if __name__ == "__main__":',
            ) from error
        except Exception as error:
            raise ConfigError(f"{doing} raised {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Return the type of an error, its first line, and the user's file and line."""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = said.strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__
    return f"{text}{_place(error)}"


def module_of(error: BaseException, model: nn.Module) -> str:
    """Return the name and class of the innermost module of `model` in which an error was raised."""
    names = {id(module): name for name, module in model.named_modules() if name}
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [each for each in owners if id(each) in names]
    return f"{names[id(found[-1])]} ({type(found[-1]).__name__})" if found else type(model).__name__


def _place(error: BaseException) -> str:
    """Return `` (file:line)``: the innermost frame that is neither ours nor a library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({_short(error.filename)}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    users = [frame for frame in frames if not _is_library(frame.filename)]
    return f" ({_short(users[-1].filename)}:{users[-1].lineno})" if users else ""


def _is_library(filename: str) -> bool:
    return filename.startswith((_OWN, *_LIBRARIES)) or "site-packages" in filename


def _short(filename: str) -> str:
    return os.path.relpath(filename) if filename.startswith(str(Path.cwd())) else filename


def _load_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"{what}: no file {str(path)!r}", remedy="name a file that is there: train.py:make_model"
        )
    _find_modules_in(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str, what: str) -> ModuleType:
    _find_modules_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # another module, which the user's module imports
        here = [path.stem for path in Path.cwd().glob("*.py")]
        raise ConfigError(
            f"{what}: no module {name!r}, neither installed nor in {Path.cwd()}",
            remedy=did_you_mean(name, here) if here else "run it where the module is, or name the file",
        ) from None


def _find_modules_in(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


# Batches of any number of samples, from the function that a user gives.


# Batches as shapes on a command line: ``8,128:int64``.

_TYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


def zeros_of(texts: Sequence[str], samples: int | None = None) -> tuple[torch.Tensor, ...]:
    """Return a tensor of zeros for each text; `samples` replaces the first number of each shape."""
    shapes = [read_shape(text) for text in texts]
    return tuple(
        torch.zeros(shape if samples is None else [samples, *shape[1:]], dtype=dtype) for shape, dtype in shapes
    )


def read_shape(text: str) -> tuple[list[int], torch.dtype]:
    """Read one shape with its type, float32 by default. Raises `ConfigError`."""
    shape, colon, kind = text.partition(":")
    sizes = [each.strip() for each in shape.split(",")]
    if not all(each.isdecimal() and int(each) > 0 for each in sizes):
        raise ConfigError(f"--input {text!r}: expected a shape and a type such as 8,128:int64")
    if colon and kind not in _TYPES:
        raise ConfigError(f"--input {text!r}: type {kind!r} is not known", remedy=did_you_mean(kind, _TYPES))
    return [int(each) for each in sizes], _TYPES[kind] if colon else torch.float32


SAMPLES = 2
"""Samples of the example batch, where the function takes a number."""


class Batches:
    """Makes batches: the function takes the number of samples, or nothing and returns an example."""

    def __init__(self, make_batch: Callable[..., Any]) -> None:
        self._make = make_batch
        self.takes_samples = _takes_a_number(make_batch)

    def example(self, samples: int = SAMPLES) -> tuple[Any, int]:
        """Return a batch and its number of samples: `samples`, or what a function without arguments gives."""
        batch = self.made(samples)
        return batch, samples_of(batch)

    def made(self, samples: int = SAMPLES) -> Any:
        """Return what the function returns, which may be no tensors that count samples."""
        with errors_of_user("making the batch"):
            return self._make(samples) if self.takes_samples else self._make()

    def of(self, samples: int) -> Any:
        """Return a batch of `samples`: the example's samples again and again if the function takes no number."""
        if self.takes_samples:
            batch, found = self.example(samples)
            if found != samples:
                raise ConfigError(
                    f"the function for the batch was asked for {samples} samples and returned {found}",
                    remedy="make its tensors' first dimension the number that it gets",
                )
            return batch
        batch, found = self.example()
        return batch if found == samples else resized(batch, found, samples)


def samples_of(batch: Any) -> int:
    """Return the first dimension that most tensors of `batch` have. Raises `ConfigError` without one."""
    sizes = Counter(each.shape[0] for each in tree_leaves(batch) if isinstance(each, torch.Tensor) and each.dim())
    if not sizes:
        raise ConfigError(
            f"the function for the batch returned {type(batch).__name__} without a tensor that has samples",
            remedy="return a tensor, a sequence of the model's positional arguments, or a mapping of named ones",
        )
    samples = int(sizes.most_common(1)[0][0])
    if samples < 1:
        raise ConfigError(
            "the function for the batch returned an empty batch", remedy="return at least one sample"
        )
    return samples


def resized(batch: Any, before: int, samples: int) -> Any:
    """Return `batch` with `samples` instead of `before`, in every tensor whose first dimension these are.

    What is there twice, such as ids that are labels too, is one tensor again.
    """
    made: dict[int, torch.Tensor] = {}

    def resize(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or not each.dim() or each.shape[0] != before:
            return each
        times = -(-samples // before)
        if id(each) not in made:
            made[id(each)] = (torch.cat([each] * times) if times > 1 else each)[:samples].clone()
        return made[id(each)]

    return tree_map(resize, batch)


def batch_bytes(batch: Any) -> int:
    """Return the bytes of the tensors of `batch`, each once."""
    found = {id(each): each.nbytes for each in tree_leaves(batch) if isinstance(each, torch.Tensor)}
    return sum(found.values())


def as_inputs(batch: Any) -> Any:
    """Return `batch` as `farandole.step` takes inputs: a tensor, a tuple or a dict."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return batch if isinstance(batch, torch.Tensor) else tuple(batch)


def _takes_a_number(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in kinds and each.default is each.empty for each in signature.parameters.values())


# One forward pass of a user's model as a loop would make it: its call, its loss, autocast, and recomputation.


Loss = Callable[[Any, Any], torch.Tensor]
"""From what a model returns, and the batch, to a scalar."""


@contextlib.contextmanager
def recomputed(model: nn.Module, recompute: str, *, draws_again: bool = False) -> Iterator[None]:
    """Apply one of `farandole.plan.memory.RECOMPUTE`: "blocks" keep their inputs, and compute the rest again.

    `draws_again`: with the same random numbers. Their state is small, and fake tensors have none.
    """
    blocks = [module for _, module in repeated_blocks(model)] if recompute == "blocks" else []
    before = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            again = partial(
                checkpoint,
                block.forward,
                use_reentrant=False,
                preserve_rng_state=draws_again,
                context_fn=_contexts,
            )
            vars(block)["forward"] = again
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                vars(block).pop("forward", None)
            else:
                vars(block)["forward"] = forward


def _contexts() -> tuple[Any, Any]:
    return own_casts(), own_casts()


def weight_type(precision: str) -> torch.dtype | None:
    """Return the type that parameters and batch are converted to in a precision; None: they stay as they are."""
    return torch.bfloat16 if precision == "bf16-weights" else None


def batch_in(dtype: torch.dtype | None, batch: Any, device: torch.device | str | None = None) -> Any:
    """Return `batch` on `device`, with its floating-point tensors in `dtype`; None: as they are."""

    def move(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        return each.to(device=device, dtype=dtype if each.is_floating_point() else None)

    return tree_map(move, batch)


def forward_loss(model: nn.Module, batch: Any, loss: Loss | None, *, device: str, precision: str) -> torch.Tensor:
    """Return the loss of one forward pass, a scalar; the backward pass is the caller's.

    Args:
        model: the model.
        batch: a tensor, a sequence of positional arguments, or a mapping of keyword arguments; with a loss also a
            pair of one of these and targets: see `inputs_and_targets`.
        loss: see `Loss`; None: the sum of what the model returns, or its ``loss``.
        device: "cpu" or "cuda", for autocast.
        precision: one of `farandole.plan.memory.PRECISIONS`.

    Raises `ConfigError` if there is no scalar, or if it depends on no trainable parameter.
    """
    autocast = torch.autocast(device, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with autocast:
        inputs, targets = inputs_and_targets(model, batch, loss)
        arguments, named = as_call(inputs)
        scalar = scalar_loss(model(*arguments, **named), targets, loss)
    if not scalar.requires_grad:
        raise ConfigError(
            "what the model returns depends on no trainable parameter, so there is no backward pass",
            remedy="name a function of outputs and batch with --loss, or let parameters require gradients",
        )
    return scalar


def passes_of(loss: Loss | None) -> str:
    """Return what `forward_loss` runs, in words."""
    return "the forward pass" if loss is None else "the forward pass, or the loss,"


def inputs_and_targets(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[Any, Any]:
    """Return what the model is called with, and what the loss gets beside its outputs: the batch is both.

    But with a loss, a pair that `forward` does not take as two arguments, or that begins with a dict, is (inputs,
    targets), as of a loader.
    """
    if loss is None or not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return batch, batch
    takes_one = isinstance(batch[0], Mapping) or (_takes(model, batch[0]) and not _takes(model, batch))
    return (batch[0], batch[1]) if takes_one else (batch, batch)


def _takes(model: nn.Module, inputs: Any) -> bool:
    arguments, named = as_call(inputs)
    try:
        inspect.signature(model.forward).bind(*arguments, **named)
    except (TypeError, ValueError):
        return False
    return True


def _check_loss(loss: Loss) -> None:
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # of no Python function
        return
    try:
        signature.bind(None, None)
    except TypeError as problem:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ConfigError(
            f"--loss: {name}{signature} is called with two arguments, as loss(outputs, batch): {problem}",
            remedy=f"write it as: def {name}(outputs, batch): ...",
        ) from None


def scalar_loss(outputs: Any, batch: Any, loss: Loss | None) -> torch.Tensor:
    """Return the loss of what a model returned: see `forward_loss`. Raises `ConfigError` if it is no scalar."""
    if loss is not None:
        _check_loss(loss)
        scalar = loss(outputs, batch)
    elif isinstance(getattr(outputs, "loss", None), torch.Tensor):
        scalar = outputs.loss
    else:
        leaves = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor)]
        sums = [each.sum() for each in leaves if each.is_floating_point()]
        if not sums:
            raise ConfigError(
                f"the model returns {type(outputs).__name__} without a floating-point tensor to sum",
                remedy="name a function of outputs and batch with --loss",
            )
        scalar = torch.stack([each.float() for each in sums]).sum() if len(sums) > 1 else sums[0]
    if not isinstance(scalar, torch.Tensor) or scalar.numel() != 1:
        found = tuple(scalar.shape) if isinstance(scalar, torch.Tensor) else type(scalar).__name__
        raise ConfigError(f"--loss returned {found}, expected a tensor with one element")
    return scalar
