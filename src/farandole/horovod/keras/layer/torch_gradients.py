"""The gradients of a Keras optimizer on torch: flat buckets, exchanged in place by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....comm.named_ops.operations.request import Request, Ticket
from ....core.vocabulary.codec_spec import NONE, CodecSpec
from ....core.vocabulary.spec import Plan
from ...common.applied_plan import apply_plan, codec_of_gradient, plan_for_named, refuse_other_passes
from ...common.basics import basics
from ...common.exceptions import HorovodMismatchError
from ...common.operations import begin, set_number, wait
from ...common.reductions import Adasum, Average, reduction_of
from ...common.running import Running
from ...exchange.buckets import FlatBucket, GradientPart, plan_buckets
from ...exchange.layouts import Place, layout_text, layouts
from ...exchange.rounds import Round, RoundPart
from ...exchange.settings import GradientSettings, group_numbers
from ...verify.arrays import Array
from ...verify.observed import observe
from ...verify.verification import find_verification


class TorchGradients:
    """A `backends.KerasGradients`."""

    def __init__(self, settings: GradientSettings, name: str, *, for_jax: bool = False) -> None:
        """`for_jax`: whether a step of JAX calls this: then variables are stand-ins, which cannot be read."""
        self._for_jax = for_jax
        self.settings = settings
        self.name = name
        self.local: set[int] = set()

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks; None stays None."""
        settings, running = self.settings, basics.running
        running.plan_is_applied = True
        plan = apply_plan(running.plan, settings.compression, settings.passes)
        process_set = settings.process_set
        results = list(gradients)
        size = process_set.size()
        if not process_set.included() or size is None or size == 1:
            return results
        plan = plan_for_named(running.plan, plan, settings.op, "those of Keras travel so")
        refuse_other_passes(running.plan, plan, settings.passes)
        natives = [getattr(variable, "value", variable) for variable in variables]
        kept = {i for i, native in enumerate(natives) if id(native) in self.local}
        for i in kept:
            if results[i] is not None and settings.scale_local_gradients:
                results[i] = results[i] / size
        labels = [str(getattr(each, "path", i)).partition("/")[2] or str(i) for i, each in enumerate(variables)]
        is_unseen = self._for_jax and not _is_in_fit(running)
        observed = (
            None
            if is_unseen
            else observe(
                running, self.name, variables, labels, settings, plan, is_eager=not self._for_jax, read=_read
            )
        )
        places = [i for i, gradient in enumerate(results) if i not in kept and gradient is not None]
        own = [] if observed is None else [_as_numpy(results[i]) for i in places]
        if observed is not None and observed.is_replay:
            observed.tell(places, own, own)
            return results
        layout = self._compare(labels, results, kept)
        groups = group_numbers(settings.groups, variables, lambda each: id(getattr(each, "value", each)))
        sent: dict[int, tuple[torch.Tensor, Any]] = {}
        parts = []
        for i, gradient in enumerate(results):
            if i not in kept and gradient is not None:
                sent[i] = settings.compression.compress(gradient.detach().contiguous())
                parts.append(self._part(i, sent[i][0], labels[i], groups.get(i), plan))
        buckets = plan_buckets(parts, plan.bucket_bytes)
        flats = [_flat(bucket, [sent[part.index][0] for part in bucket.parts]) for bucket in buckets]
        round_ = Round(self.name, one_by_one=False, front_end=f"keras on {'jax' if self._for_jax else 'torch'}")
        tickets: list[Ticket] = []
        going: list[RoundPart] = []
        try:
            for number, (bucket, flat) in enumerate(zip(buckets, flats, strict=True)):
                names = tuple(labels[part.index] for part in bucket.parts)
                going.append(round_.add(bucket.nbytes, bucket.codec, names))
                going[-1].submitted()
                tickets += begin([self._request(number, bucket, flat)])
            round_.all_added()
            wait(tickets)
        except HorovodMismatchError as problem:
            raise layouts.explained(problem, f"allreduce.{self.name}.0", layout) from problem
        for part_of_round, ticket in zip(going, tickets, strict=True):
            part_of_round.arrived(ticket)
        for bucket, flat in zip(buckets, flats, strict=True):
            offset = 0
            for part in bucket.parts:
                share = flat if bucket.is_whole else flat[offset : offset + part.elements].view(part.shape)
                offset += part.padded
                results[part.index] = settings.compression.decompress(share, sent[part.index][1])
        if observed is not None:
            observed.tell(places, own, [_as_numpy(results[i]) for i in places])
        return results

    def _compare(self, labels: Sequence[str], gradients: Sequence[Any], kept: set[int]) -> str:
        """Return the layout, after it was compared: each time by a rank without gradients, as others may wait."""
        places = [
            Place(label, (), "") if gradient is None else Place(label, tuple(gradient.shape), str(gradient.dtype))
            for i, (label, gradient) in enumerate(zip(labels, gradients, strict=True))
            if i not in kept
        ]
        layout = layout_text(places)
        if places:
            number = set_number(self.settings.process_set, "Allreduce")
            has_none = not any(place.dtype for place in places)
            layouts.compare_now(f"allreduce.{self.name}.0", layout, number, again=has_none)
        return layout

    def _part(self, index: int, sent: torch.Tensor, label: str, group: int | None, plan: Plan) -> GradientPart:
        alone, codec = self.settings.op == Adasum, NONE
        if plan.codec != NONE or plan.codec_for:
            codec = codec_of_gradient(label, sent, plan)
            alone = alone or CodecSpec.parse(codec).is_low_rank
        dtype = str(sent.dtype)
        return GradientPart(index, tuple(sent.shape), dtype, sent.element_size(), codec, alone, group)

    def _request(self, number: int, bucket: FlatBucket, flat: torch.Tensor) -> Request:
        settings = self.settings
        factor = settings.predivide_factor if settings.op == Average else 1.0
        return Request(
            f"allreduce.{self.name}.{number}",
            "allreduce",
            flat,
            in_place=True,
            reduction=reduction_of(settings.op),
            prescale=1.0 / factor,
            postscale=factor,
            process_set=set_number(settings.process_set, "Allreduce"),
            codec=bucket.codec,
            chosen_with=self.name,
        )


def _is_in_fit(running: Running) -> bool:
    """Return whether ``farandole verify`` sees the steps by the loop of `fit`, which reads variables itself."""
    verification = find_verification(running.world)
    return verification is not None and verification.fit is not None


def _as_numpy(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    found: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
    return found


def _read(variable: Any) -> Array:
    return _as_numpy(getattr(variable, "value", variable))


def _flat(bucket: FlatBucket, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a buffer of its own with the gradients of a bucket."""
    if bucket.is_whole:
        return tensors[0].clone()
    flat = tensors[0].new_zeros(sum(bucket.sizes))
    offset = 0
    for part, tensor in zip(bucket.parts, tensors, strict=True):
        flat[offset : offset + part.elements].copy_(tensor.reshape(-1))
        offset += part.padded
    return flat
