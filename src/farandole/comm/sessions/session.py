"""Codec sessions: give named tensors, get their mean over the ranks; no autograd hooks, any thread.

Synchronisation policies (local SGD, DiLoCo) exchange parameter deltas by it. Residuals are kept by name::

    route = connect_route(world, plan, needs_messages=True, parameter_bytes=nbytes)  # by all ranks
    session = CodecSession(route, CodecSpec.parse("int8"))
    means = session.mean({"layer.weight": delta})

[Note: one order of exchanges] The ranks of a route must submit the same exchanges in the same order. One lock
keeps the calls of several threads apart on a rank; that all ranks call in the same order is the caller's part. A
session that is used beside a reducer has a route of its own, and so connections and a thread of its own. It
exchanges among all ranks, whatever the route does with buckets.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Any

import torch

from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import ConfigError, Mismatch
from ..codecs.finite import is_finite
from ..codecs.registry import make_codec
from ..messages.message import Message, Reduction
from ..routes.route import Route
from ..transport.comm_thread import SegmentWork
from .coded_flat import CodedFlat, FlatPart
from .saved_state import Entry, export, restore
from .segments import MULTIPLE


class CodecSession:
    """Means of named tensors by one codec."""

    def __init__(self, route: Route, spec: CodecSpec) -> None:
        """`route`: connected by all ranks with messages; it stays the caller's to close."""
        assert route.conductor is not None, "a session's route has messages"
        self._thread, self._group = route.conductor, route.everyone
        self._codec = make_codec(spec)
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._flat = torch.empty(0, dtype=torch.float32)
        self._coded: CodedFlat | None = None
        self._waiting: dict[str, Entry] = {}
        """State of names that are not among those of the last exchange."""

    @torch.no_grad()
    def mean(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the mean over the ranks of each tensor, with the same bits on all ranks.

        The order of names does not matter. If a tensor of some rank, or a mean, holds NaN or infinity, all means
        are NaN on all ranks, and the state stays as it was.

        Args:
            tensors: float32 tensors in CPU memory, of any shape; they are not changed.

        Returns:
            New tensors, by name.

        Raises:
            Mismatch: on all ranks, if names, shapes or dtypes differ between ranks; nothing was exchanged.
            ConfigError: a tensor is not float32 in CPU memory, or has another shape than its saved state.
        """
        with self._lock:
            lines = [
                f"{name} {list(each.shape)} {each.dtype} {each.device.type}" for name, each in tensors.items()
            ]
            local_finite = all(is_finite(each) for each in tensors.values() if each.is_floating_point())
            all_finite = self._agree("\n".join(sorted(lines)), local_finite)
            for name, each in tensors.items():
                if each.dtype != torch.float32 or not each.is_cpu:
                    found = f"{each.dtype} on {each.device}"
                    raise ConfigError(f"codec session: {name!r} is {found}, expected float32 on cpu")
            coded = self._lay_out({name: tensors[name] for name in sorted(tensors)})
            parts = coded.by_part(self._flat)
            self._flat.zero_()
            for name, part in zip(self._names, parts, strict=True):
                part.copy_(tensors[name])
            if not all_finite or not self._exchange(coded):
                self._flat.fill_(torch.nan)
            return {name: part.clone() for name, part in zip(self._names, parts, strict=True)}

    def rollback(self) -> None:
        """Keep the state from before the last exchange, whose means are not used; to be called by all ranks."""
        with self._lock:
            if self._coded is not None:
                self._coded.states.restore()

    def state(self) -> dict[str, Any]:
        """Return this rank's state by name, copied: plain tensors, numbers and texts."""
        with self._lock:
            return {**self._waiting, **self._export()}

    def load_state(self, entries: Mapping[str, Any]) -> None:
        """Replace the state by what `state` returned on this rank; names that are not in it begin anew."""
        with self._lock:
            self._waiting, self._coded, self._names = dict(entries), None, []

    def _export(self) -> dict[str, Entry]:
        return {} if self._coded is None else export(self._coded, self._names)

    def _lay_out(self, tensors: Mapping[str, torch.Tensor]) -> CodedFlat:
        """Return the layout of `tensors`, with the state of their names."""
        shapes = [tuple(each.shape) for each in tensors.values()]
        fits = self._coded is not None and [part.shape for part in self._coded.parts] == shapes
        if self._coded is not None and fits and self._names == list(tensors):
            return self._coded
        entries = {**self._waiting, **self._export()}
        for name, each in tensors.items():
            for key, kept in entries.get(name, {}).get("elements", {}).items():
                if kept.shape != each.shape:
                    raise ConfigError(
                        f"codec session: {name!r} has shape {tuple(each.shape)}, its {key} {tuple(kept.shape)}"
                    )
        parts, offset = [], 0
        for each in tensors.values():
            parts.append(
                FlatPart(
                    tuple(each.shape), torch.empty(each.shape, dtype=torch.float32, device="meta").stride(), offset
                )
            )
            offset += each.numel()
        multiple = MULTIPLE * len(self._group.ranks)
        self._flat = torch.zeros(-(-offset // multiple) * multiple, dtype=torch.float32)
        self._names, self._waiting = list(tensors), entries
        self._coded = CodedFlat(self._codec, self._group, self._flat, parts)
        restore([(self._coded, self._names)], self._waiting)
        return self._coded

    def _exchange(self, coded: CodedFlat) -> bool:
        """Exchange the flat tensor; return whether all means are finite. If not, the state is as it was."""
        units = coded.by_unit(self._flat)
        for k, unit in enumerate(units):
            coded.states.begin(k, unit)
        finite: list[bool] = []
        self._thread.submit(coded.work(units, finite.append)).wait()
        if not all(finite):
            coded.states.restore()
        return all(finite)

    def _agree(self, text: str, local_finite: bool) -> bool:
        """Return whether all ranks' tensors are finite; raise `Mismatch` on all ranks if their texts differ."""
        digest = hashlib.sha256(text.encode()).digest()
        rows = self._gather(torch.tensor([*digest, local_finite], dtype=torch.uint8))
        if bool((rows[:, :-1] == rows[0, :-1]).all()):
            return bool(rows[:, -1].all())
        encoded = text.encode()
        length = int(self._gather(torch.tensor([len(encoded)], dtype=torch.int64)).max())
        padded = torch.tensor([*encoded.ljust(length, b"\n")], dtype=torch.uint8)
        texts = [bytes(row.tolist()).decode().strip("\n").split("\n") for row in self._gather(padded)]
        rank = next(rank for rank, lines in enumerate(texts) if lines != texts[0])
        here, there = sorted(set(texts[0]) - set(texts[rank])), sorted(set(texts[rank]) - set(texts[0]))
        raise Mismatch(
            f"rank {self._group.ranks[0]} has {', '.join(here[:3]) or 'no other tensor'}, "
            f"rank {self._group.ranks[rank]} {', '.join(there[:3]) or 'no other tensor'}",
            rank=self._group.rank,
            operation="codec session",
            remedy="give the same names, shapes and dtypes on all ranks",
        )

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks."""
        results: list[torch.Tensor] = []

        def begin() -> Reduction:
            return (yield Message(row, "all_gather"))

        self._thread.submit([SegmentWork(begin, results.append, self._group)]).wait()
        return results[0]
