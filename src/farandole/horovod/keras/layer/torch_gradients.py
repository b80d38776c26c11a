"""How the gradients of a Keras optimizer on torch meet: flat buckets, exchanged in place by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....comm.named_ops.operations import Request, Ticket
from ...common.exceptions import HorovodMismatchError
from ...common.operations import begin, set_number, wait
from ...exchange.buckets import FlatBucket
from ...exchange.layouts import Place, layouts
from ...exchange.rounds import Round, RoundPart
from ...named_gradients import NamedGradients, Sent


class TorchGradients(NamedGradients):
    """How the gradients of one optimizer meet."""

    travel_so = "those of Keras travel so"
    front_end = "keras on torch"

    def _is_alone(self) -> bool:
        return self.settings.process_set.size() in (None, 1)

    def _place(self, label: str, gradient: torch.Tensor | None) -> Place:
        return (
            Place(label, (), "") if gradient is None else Place(label, tuple(gradient.shape), str(gradient.dtype))
        )

    def _begin(self, layout: str, there: Sequence[int], *, has_none: bool) -> None:
        """Compare the layout: each time by a rank without gradients, as others may wait."""
        if there:
            number = set_number(self.settings.process_set, "Allreduce")
            layouts.compare_now(f"allreduce.{self.name}.0", layout, number, again=has_none)

    def _compress(self, gradient: torch.Tensor, variable: Any) -> Sent:
        sent, context = self.settings.compression.compress(gradient.detach().contiguous())
        return Sent(sent, context, tuple(sent.shape), sent.dtype)

    def _exchange(
        self, buckets: Sequence[FlatBucket], tensors: Sequence[Any], layout: str, names: Sequence[tuple[str, ...]]
    ) -> list[list[Any]]:
        flats = [_flat(bucket, own) for bucket, own in zip(buckets, tensors, strict=True)]
        round_ = Round(self.name, one_by_one=False, front_end=self.front_end)
        tickets: list[Ticket] = []
        going: list[RoundPart] = []
        try:
            for number, (bucket, flat) in enumerate(zip(buckets, flats, strict=True)):
                going.append(round_.add(bucket.nbytes, bucket.codec, names[number]))
                going[-1].submitted()
                tickets += begin([self._request(number, bucket, flat)])
            round_.all_added()
            wait(tickets)
        except HorovodMismatchError as problem:
            raise layouts.explained(problem, f"allreduce.{self.name}.0", layout) from problem
        for part, ticket in zip(going, tickets, strict=True):
            part.arrived(ticket)
        return [_shares(bucket, flat) for bucket, flat in zip(buckets, flats, strict=True)]

    def _request(self, number: int, bucket: FlatBucket, flat: torch.Tensor) -> Request:
        return Request(
            f"allreduce.{self.name}.{number}",
            "allreduce",
            flat,
            in_place=True,
            process_set=set_number(self.settings.process_set, "Allreduce"),
            codec=bucket.codec,
            chosen_with=self.name,
            **self._operation(),
        )

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        size = self.settings.process_set.size()
        assert size is not None, "not alone"
        return gradient / size

    def _read(self, variable: Any) -> Any:
        tensor = getattr(variable, "value", variable).detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _flat(bucket: FlatBucket, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a buffer of its own with the gradients of a bucket."""
    if bucket.is_whole:
        return tensors[0].clone()
    flat = tensors[0].new_zeros(sum(bucket.sizes))
    for part, share, tensor in zip(bucket.parts, flat.split(bucket.sizes), tensors, strict=True):
        share[: part.elements].copy_(tensor.reshape(-1))
    return flat


def _shares(bucket: FlatBucket, flat: torch.Tensor) -> list[torch.Tensor]:
    if bucket.is_whole:
        return [flat]
    shares = zip(bucket.parts, flat.split(bucket.sizes), strict=True)
    return [share[: part.elements].view(part.shape) for part, share in shares]
