"""BatchNorm over the global batch: every rank normalises with the statistics of all samples.

`GlobalStatistics` turns a model's BatchNorm layers into their synchronised kin in place: the class of the layer
changes, its parameters, buffers, names and `isinstance` checks do not. Works on CPU and GPU
(torch's own SyncBatchNorm refuses CPU tensors). A copy of such a layer, made in memory or by a file, is of the
plain class again: it belongs to no group of ranks, and normalises by itself.

[Note: subclasses] A subclass of the user's with a ``forward`` of its own (a fused activation, say) keeps it: what
it asks of ``torch.nn.functional.batch_norm`` is answered with the statistics of all ranks. One that computes
otherwise is refused by name in its first pass.

[Note: unequal shares] Statistics are sums over samples divided by the global count, so short batches
are weighted by themselves. In backward the gradients that reach the layer belong to each rank's own
mean loss; they are brought to the global loss's scale by the rank's share before they are mixed, and
back afterwards. See [Note: the true mean] in `comm.batch_weight`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ...comm.world.comm_errors import translated
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.errors import CommError, ConfigError
from ..changed_class import ChangedClass, plain_class_of, set_class
from ..model import Strategy


class GlobalStatistics(Strategy):
    """The plan's `sync_batch_norm`: statistics of BatchNorm layers are of the samples of all ranks."""

    takes_own_parameters = True

    def is_asked(self) -> bool:
        """Where several ranks have other samples."""
        return self.plan.sync_batch_norm and self.distributed.exchanges

    def apply(self) -> None:
        """Let the layers use them from now on. They travel in a group of their own."""
        layers = [each for each in self.model.modules() if isinstance(each, _BatchNorm) and not _by_others(each)]
        if not layers:
            return
        stats_group = StatsGroup(self.mesh.replicas)
        stats_group.layers = Counter(type(layer).__name__ for layer in layers)
        for layer in layers:
            kind: Any = type(layer)
            layer.__class__ = _kin(kind)
            object.__setattr__(layer, "_farandole", stats_group)
        self.distributed.hooks.append(_Kins(layers))


class _Kins:
    """The layers that were changed: a handle that lets them normalise by this rank's samples again."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(map(weakref.ref, layers))

    def remove(self) -> None:
        for ref in self._layers:
            if (layer := ref()) is not None and stats_group_of(layer) is not None:
                set_class(layer, plain_class_of(layer))
                object.__delattr__(layer, "_farandole")


def is_synchronised(module: nn.Module) -> bool:
    """Return whether the layer's statistics are global already."""
    return isinstance(module, (Synchronised, _Answered, nn.SyncBatchNorm))


def stats_group_of(module: nn.Module) -> StatsGroup | None:
    """Return the group in which the layer's statistics travel, if `GlobalStatistics` made it."""
    found = vars(module).get("_farandole")
    return found if isinstance(found, StatsGroup) else None


def local_layers(model: nn.Module) -> list[str]:
    """Return the names of BatchNorm layers that normalise with this rank's own samples in training."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and not is_synchronised(module)
        and (module.training or module.running_mean is None)
    ]


def _by_others(layer: nn.Module) -> bool:
    """Return whether the layer is synchronised already, by us or among ranks that the user chose."""
    if isinstance(layer, nn.SyncBatchNorm) and not isinstance(layer, Synchronised):
        return layer.process_group not in (None, dist.group.WORLD)
    return is_synchronised(layer)


class StatsGroup:
    """The group in which a model's batch statistics travel, until the world closes."""

    def __init__(
        self, world: World, translate: Callable[[CommError], Exception] = lambda problem: problem
    ) -> None:
        self.world = world
        self._translate = translate
        self.layers: Counter[str] = Counter()
        """The layers that use it, by the name of their class."""
        self._sums: list[torch.Tensor] | None = None
        self._replayed: Iterator[torch.Tensor] | None = None
        self._group: dist.ProcessGroup | None = world.new_group()
        if self._group is not None:
            release = partial(world.drop_group, self._group)
            self._when_dropped = weakref.finalize(self, world.session.let_go_later, release)
            self._when_dropped.atexit = False
        world.session.call_on_close(self.close)
        world.session.call_in_forked_child(self.close)

    def close(self) -> None:
        """Let go of the group."""
        if self._group is not None:
            self._when_dropped.detach()
        self._group = None

    @contextmanager
    def remember(self, sums: list[torch.Tensor]) -> Iterator[None]:
        """Append each sum of this forward pass to `sums`."""
        before, self._sums = self._sums, sums
        try:
            yield
        finally:
            self._sums = before

    @contextmanager
    def replay(self, sums: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let each sum be the next one of `sums`, of a forward pass that is run again: nothing is sent."""
        before, self._replayed = self._replayed, iter(sums)
        try:
            yield
        finally:
            self._replayed = before

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self._replayed is not None:
            return next(self._replayed)
        result = self._sum(tensor)
        if self._sums is not None:
            self._sums.append(result)
        return result

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        operation = "all-reduce of batch statistics"
        if self._group is None:
            problem = CommError("the world was left", rank=self.world.job_rank, operation=operation)
            raise self._translate(problem)
        try:
            with translated(self.world, operation):
                dist.all_reduce(tensor, group=self._group)
        except CommError as failure:
            raise self._translate(failure) from None
        return tensor


class Synchronised(_BatchNorm):
    """A BatchNorm layer over the samples of all ranks; `_farandole` is set before its first forward pass."""

    _farandole: StatsGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name for it
        """Normalise, in training by all ranks' statistics."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        momentum = self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        affine = self.weight, self.bias
        running = (self.running_mean, self.running_var) if self.training else (None, None)
        return _normalise(input, affine, running, momentum or 0.0, self.eps, self._farandole)


def _normalise(  # noqa: PLR0917 - two pairs and four
    x: torch.Tensor,
    affine: tuple[torch.Tensor | None, torch.Tensor | None],
    running: tuple[torch.Tensor | None, torch.Tensor | None],
    momentum: float,
    eps: float,
    stats_group: StatsGroup,
) -> torch.Tensor:
    """Normalise by all ranks' statistics, and let the running ones follow."""
    output, mean, variance, count = _GlobalNorm.apply(x, *affine, eps, stats_group)
    running_mean, running_variance = running
    if running_mean is not None and running_variance is not None:
        with torch.no_grad():
            unbiased = variance * (count / (count - 1).clamp(min=1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_variance.lerp_(unbiased.to(running_variance.dtype), momentum)
    normalised: torch.Tensor = output
    return normalised


class _Answered(_BatchNorm):
    """A layer whose own ``forward`` runs. See [Note: subclasses]."""

    _farandole: StatsGroup

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the user's forward pass, in training by all ranks' statistics."""
        if not self.training and self.running_mean is not None:
            return super().forward(*arguments, **named)
        with _Answer(self._farandole) as answer:
            output = super().forward(*arguments, **named)
        if not answer.was_asked:
            name, layers = type(self).__name__, self._farandole.layers
            raise ConfigError(
                f"sync_batch_norm: {layers[name]} of {layers.total()} BatchNorm layers are of a class that cannot "
                f"be synchronised: the forward pass of {name} does not call torch.nn.functional.batch_norm",
                remedy="leave sync_batch_norm out, or use torch.nn.BatchNorm2d and its kin",
            )
        return output


class _Answer(TorchFunctionMode):
    """Answers `torch.nn.functional.batch_norm` within a forward pass."""

    def __init__(self, stats_group: StatsGroup) -> None:
        super().__init__()
        self.was_asked = False
        self._stats_group = stats_group

    def __torch_function__(
        self, function: Any, _: Any, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(named or {})
        if function is functional.batch_norm:
            given = {**_DEFAULTS, **dict(zip(_ARGUMENTS, arguments, strict=False)), **named}
        elif function is torch.batch_norm:
            given = {**_DEFAULTS, **dict(zip(_TORCH_ARGUMENTS, arguments, strict=False)), **named}
        else:
            return function(*arguments, **named)
        self.was_asked = True
        if not given["training"]:
            return function(*arguments, **named)
        affine, running = (given["weight"], given["bias"]), (given["running_mean"], given["running_var"])
        return _normalise(given["input"], affine, running, given["momentum"], given["eps"], self._stats_group)


_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_TORCH_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


@lru_cache(maxsize=256)
def _kin(kind: type[Any]) -> type[Any]:
    """Return the synchronised kin of a class of BatchNorm layers."""
    computes_as_torch = kind.forward is _BatchNorm.forward or issubclass(kind, nn.SyncBatchNorm)
    bases: tuple[type[Any], ...] = (ChangedClass, Synchronised if computes_as_torch else _Answered, kind)
    members = {"plain_class": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, bases, members)


class _GlobalNorm(torch.autograd.Function):
    """Normalise over batch and space of all ranks. Ioffe and Szegedy, 2015, algorithms 1 and 2."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        input: torch.Tensor,  # noqa: A002
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        stats_group: StatsGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        x = input.to(wide)
        axes = [0, *range(2, x.dim())]
        present = stats_group.world.session.batch_weight.by_samples != 0.0
        sums = torch.cat([x.sum(axes), x.new_full((1,), x.numel() / max(1, x.shape[1]))])
        sums = stats_group.sum(sums if present else torch.zeros_like(sums))
        count = sums[-1].clamp(min=1)
        mean = sums[:-1] / count
        shape = [1, -1, *[1] * (x.dim() - 2)]
        centred = x - mean.view(shape)
        # Second pass about the mean: a difference of large squares would lose what one process keeps.
        squares = centred.square().sum(axes)
        squares = stats_group.sum(squares if present else torch.zeros_like(squares))
        variance = squares / count
        inverse = torch.rsqrt(variance + eps)
        normalised = centred * inverse.view(shape)
        output = normalised if weight is None else normalised * weight.to(wide).view(shape)
        if bias is not None:
            output = output + bias.to(wide).view(shape)
        ctx.save_for_backward(normalised, inverse, weight, count)
        ctx.stats_group, ctx.factor = stats_group, stats_group.world.session.batch_weight.factor
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normalised, inverse, weight, count = ctx.saved_tensors
        g = grads[0].to(normalised.dtype)
        axes = [0, *range(2, g.dim())]
        shape = [1, -1, *[1] * (g.dim() - 2)]
        sum_g = g.sum(axes)
        sum_gx = (g * normalised).sum(axes)
        own = torch.cat([sum_g, sum_gx])
        # To the scale of the global loss, mixed, and back to this rank's own.
        share = ctx.stats_group.world.session.batch_weight
        factor = share.at_backward(ctx.factor)
        if not factor and share.by_samples:
            raise ConfigError(
                "fd.weight(0) on a rank whose samples are part of the statistics of synchronised BatchNorm layers",
                remedy="give every rank at least one token, or set sync_batch_norm = false",
            )
        mixed = ctx.stats_group.sum(own * factor if factor else torch.zeros_like(own))
        mixed = mixed / factor if factor else torch.zeros_like(mixed)
        mean_g, mean_gx = (mixed / count).chunk(2)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        dx = (g - mean_g.view(shape) - normalised * mean_gx.view(shape)) * scale.view(shape)
        d_weight = sum_gx.to(weight.dtype) if weight is not None else None
        d_bias = sum_g.to(grads[0].dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return dx.to(grads[0].dtype), d_weight, d_bias, None, None


# Buffers that change while training, kept equal on all ranks.
#
# [Note: what becomes of running statistics] With plain BatchNorm every rank sees its own batches, so running means
# and variances drift apart. They travel with each exchange of gradients and become the mean over the ranks,
# weighted by samples: statistics of all the data, not of rank 0's share of it. A layer in evaluation mode, and any
# other floating-point buffer, keeps rank 0's very bits. Buffers that do not change in the first step (masks,
# tables of angles) are left alone and cost nothing, and integer buffers (`num_batches_tracked`) advance alike by
# themselves.


class BufferSync:
    """Carries a model's changing buffers with the gradients. `ExtraTensors` of `comm.engine`."""

    def __init__(self, world: World, model: nn.Module) -> None:
        self._world = world
        # Who keeps a model's reducer keeps this: it must not keep the model in turn.
        self._seen_model = weakref.ref(model)
        self._parts = {name: part for name, part in model.named_children() if part is not model}
        self._own = dict(model.named_buffers(recurse=False))
        self._versions = {name: buffer._version for name, buffer in model.named_buffers()}
        self._names: list[str] = []
        self._statistics: set[str] = set()
        self._flat = torch.empty(0)

    def prepare(self) -> bool:
        """Agree with all ranks on which buffers travel: those that changed since `distribute`, on any rank."""
        self._statistics = _statistics(self._model)
        changed = [
            name
            for name, buffer in self._model.named_buffers()
            if buffer.is_floating_point()
            and (name in self._statistics or buffer._version != self._versions.get(name))
        ]
        union = {name for names in all_gather_json(self._world, "agreeing on buffers", changed) for name in names}
        self._names = [name for name, _ in self._model.named_buffers() if name in union]
        return bool(self._names)

    @torch.no_grad()
    def pack(self, weight: float) -> torch.Tensor:
        """Return the flat tensor to sum over the ranks."""
        buffers = [self._model.get_buffer(name) for name in self._names]
        wide = torch.float64 if any(buffer.dtype == torch.float64 for buffer in buffers) else torch.float32
        leader = 1.0 if self._world.rank == 0 else 0.0
        pieces = []
        for name, buffer in zip(self._names, buffers, strict=True):
            averaged = name in self._statistics and self._model.get_submodule(name.rpartition(".")[0]).training
            share = weight if averaged else leader
            piece = buffer.reshape(-1).to(wide)
            # Not a product with 0: a placeholder's statistics may be NaN.
            pieces.append(piece * share if share else torch.zeros_like(piece))
        self._flat = torch.cat(pieces)
        return self._flat

    @torch.no_grad()
    def unpack(self) -> None:
        """Write the sums back."""
        offset = 0
        for name in self._names:
            buffer = self._model.get_buffer(name)
            buffer.copy_(self._flat[offset : offset + buffer.numel()].view(buffer.shape))
            offset += buffer.numel()

    @property
    def _model(self) -> nn.Module:
        """The model; one of its parts where it is gone and they live: a list of modules was distributed."""
        model = self._seen_model()
        if model is None:
            model = nn.Module()
            for name, part in self._parts.items():
                model.add_module(name, part)
            for name, buffer in self._own.items():
                model.register_buffer(name, buffer)
        return model


def _statistics(model: nn.Module) -> set[str]:
    """Return the names of the running statistics of layers that do not synchronise themselves."""
    found = set()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not is_synchronised(module):
            for name in ("running_mean", "running_var"):
                if getattr(module, name) is not None:
                    found.add(f"{prefix}.{name}" if prefix else name)
    return found
