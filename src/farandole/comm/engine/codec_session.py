"""Codec sessions: give named tensors, get their mean over the ranks; no autograd hooks, any thread.

Synchronisation policies (local SGD, DiLoCo) exchange parameter deltas by it. Residuals are kept by name::

    route = connect_route(world, plan, needs_messages=True, parameter_bytes=nbytes)  # by all ranks
    session = CodecSession(route, CodecSpec.parse("int8"))
    means = session.mean({"layer.weight": delta})

[Note: one order of exchanges] The ranks of a route must submit the same exchanges in the same order. One lock
keeps the calls of several threads apart on a rank; that all ranks call in the same order is the caller's part. A
session that is used beside a reducer has a route of its own, and so connections and a thread of its own.

[Note: a session is flat] It exchanges among all ranks, whatever the route does with buckets: on M hosts of G ranks
with a hierarchical route as well, where all G ranks of a host send over its link. A reducer's bucket sends 1/G of
that there.

[Note: prepare, agree, exchange] What can fail on one rank alone (a tensor of another type, loaded state that does
not fit, memory that is not there) is done first, and changes nothing that is kept. Then the ranks tell each other
what they are about to do and whether they can, and all of them raise, or none.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import CommError, ConfigError, FarandoleError, Mismatch
from ...core.vocabulary.text import name_ranks
from ..codecs.codec import is_finite
from ..codecs.registry import make_codec
from ..codecs.saved_state import Entry, common_part, export, require_entry, restore
from ..codecs.units import MULTIPLE, CodedFlat, FlatPart
from ..messages import Message, Reduction
from ..routes import Route
from ..transport.comm_thread import SegmentWork

_OPERATION = "codec session"
_LEAST_BYTES = 1
"""The least length of a text that is gathered: no message is empty."""


@dataclass(frozen=True)
class _Layout:
    """Named tensors side by side in a flat one, and what the codec keeps for them."""

    names: list[str] = field(default_factory=list)
    flat: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    coded: CodedFlat | None = None
    waiting: dict[str, Entry] = field(default_factory=dict)
    """State of names that are not among `names`."""

    def export(self) -> dict[str, Entry]:
        """Return the state of all names, copied."""
        return {**self.waiting, **({} if self.coded is None else export(self.coded, self.names))}


class CodecSession:
    """Means of named tensors by one codec. See [Note: a session is flat]."""

    def __init__(self, route: Route, spec: CodecSpec) -> None:
        """`route`: connected by all ranks with messages; it stays the caller's to close."""
        assert route.conductor is not None, "a session's route has a thread"
        assert route.conductor.has_transport, "a session's route has messages"
        self._thread, self._group = route.conductor, route.everyone
        self._codec = make_codec(spec)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._layout = _Layout()
        self._exchanged: CodedFlat | None = None
        """What `rollback` restores: the layout of the last mean, if it was finite."""
        self._kept_means = 0
        """Exchanges since the state was made or loaded that were not rolled back: the same on all ranks."""
        self._had_overflow = False
        """Whether some state overflowed and began anew, which the other ranks do not know yet."""

    @torch.no_grad()
    def mean(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the mean over the ranks of each tensor, with the same bits on all ranks.

        The order of names does not matter. If a tensor of some rank, or a mean, holds NaN or infinity, all means
        are NaN on all ranks, and the state stays as it was. So are they where the codec's state of some rank has
        overflowed since the last mean: that state begins anew. Call it on all ranks.

        Args:
            tensors: dense float32 tensors in CPU memory, of any shape; they are not changed.

        Returns:
            New tensors, by name.

        Raises:
            Mismatch: on all ranks, if codec, names, shapes, dtypes or the history of the state differ between
                ranks; nothing was exchanged.
            ConfigError: on all ranks, naming those concerned, if a tensor is not float32 in CPU memory, or loaded
                state does not fit it; nothing was exchanged.
            CommError: an exchange failed, or the route is closed. The session is of no further use.
        """
        self._refuse_forked_child()
        with self._lock:
            self._exchanged = None
            text, problem, layout, is_sound = "", None, self._layout, False
            try:
                text = self._describe(tensors)
                layout = self._prepare({name: tensors[name] for name in sorted(tensors)})
                is_sound = is_finite(layout.flat) and not self._had_overflow
            except Exception as found:  # whatever it is, the other ranks must hear of it
                problem = found
            all_sound = self._agree(text, problem, is_sound=is_sound)
            self._layout, self._had_overflow = layout, False
            assert layout.coded is not None, "it was prepared"
            if not all_sound or not self._exchange(layout.coded, layout.flat):
                layout.flat.fill_(torch.nan)
            parts = layout.coded.by_part(layout.flat)
            return {name: part.clone() for name, part in zip(layout.names, parts, strict=True)}

    def rollback(self) -> None:
        """Keep the state from before the last `mean`, which is not used; to be called by all ranks.

        A mean that was NaN or raised has changed nothing, and there is nothing to restore.
        """
        with self._lock:
            if self._exchanged is not None:
                self._exchanged.states.restore()
                self._exchanged = None
                self._kept_means -= 1

    def state(self) -> dict[str, Any]:
        """Return this rank's state by name, copied: plain tensors, numbers and texts.

        Raises:
            ConfigError: the state of a user-defined codec cannot be saved; the message names it.
        """
        with self._lock:
            return self._layout.export()

    def load_state(self, entries: Mapping[str, Any]) -> None:
        """Replace the state by what `state` returned on this rank; names that are not in it begin anew.

        To be called by all ranks. What does not fit is an error of the next `mean`, on all of them.
        """
        with self._lock:
            self._layout, self._exchanged = _Layout(waiting=dict(entries)), None
            self._kept_means, self._had_overflow = 0, False

    # -- this rank's part ----------------------------------------------------------------------

    def _describe(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Return what must be the same on all ranks, a line each."""
        lines = [f"codec {self._codec.spec.to_text()}", f"{self._kept_means} means kept since its state began"]
        lines += [f"{name!r} {_kind(each)}" for name, each in tensors.items()]
        waiting = self._layout.waiting
        for name in set(tensors) & set(waiting):
            require_entry(name, waiting[name])
            lines.append(f"state of {name!r}: {common_part(waiting[name])}")
        return "\n".join(sorted(lines))

    def _prepare(self, tensors: dict[str, torch.Tensor]) -> _Layout:
        """Return the layout of `tensors` with their values and the state of their names."""
        for name, each in tensors.items():
            if not isinstance(each, torch.Tensor) or not _is_plain(each):
                raise ConfigError(f"{_OPERATION}: {name!r} is {_kind(each)}, expected float32 on cpu")
            if self._codec.granularity == "matrix" and (each.dim() < 2 or each.numel() == 0):
                raise ConfigError(
                    f"{_OPERATION}: {name!r} has shape {tuple(each.shape)}, and codec "
                    f"{self._codec.spec.to_text()} takes matrices",
                    remedy="exchange it by another session, of a codec that takes any shape",
                )
        shapes = [tuple(each.shape) for each in tensors.values()]
        layout = self._layout
        fits = layout.coded is not None and [part.shape for part in layout.coded.parts] == shapes
        if not fits or layout.names != list(tensors):
            layout = self._lay_out(tensors)
        assert layout.coded is not None, "it was laid out"
        layout.flat.zero_()
        for part, each in zip(layout.coded.by_part(layout.flat), tensors.values(), strict=True):
            part.copy_(each)
        self._had_overflow |= bool(layout.coded.begin(layout.coded.by_unit(layout.flat)))
        return layout

    def _lay_out(self, tensors: dict[str, torch.Tensor]) -> _Layout:
        entries = self._layout.export()
        for name, each in tensors.items():
            for key, kept in entries.get(name, {}).get("elements", {}).items():
                if kept.shape != each.shape:
                    raise ConfigError(
                        f"{_OPERATION}: {name!r} has shape {tuple(each.shape)}, its {key} {tuple(kept.shape)}",
                        remedy="load the state of these tensors, or give what was exchanged before another name",
                    )
        parts, offset = [], 0
        for each in tensors.values():
            strides = torch.empty(each.shape, dtype=torch.float32, device="meta").stride()
            parts.append(FlatPart(tuple(each.shape), strides, offset))
            offset += each.numel()
        multiple = MULTIPLE * len(self._group.ranks)
        flat = torch.zeros(-(-offset // multiple) * multiple, dtype=torch.float32)
        coded = CodedFlat(self._codec, self._group, flat, parts)
        restore([(coded, list(tensors))], entries)
        return _Layout(list(tensors), flat, coded, entries)

    def _refuse_forked_child(self) -> None:
        if os.getpid() != self._process:
            raise CommError(
                "this process was forked from that rank, and has none of its connections",
                rank=self._group.rank,
                operation=_OPERATION,
                remedy="exchange in the process that made the session",
            )

    # -- with the other ranks ------------------------------------------------------------------

    def _exchange(self, coded: CodedFlat, flat: torch.Tensor) -> bool:
        """Exchange the flat tensor; return whether all means are finite. If not, the state is as it was."""
        finite: list[bool | torch.Tensor] = []
        self._run(coded.work(coded.by_unit(flat), finite.append))
        if not all(finite) or (coded.codec.spec.is_exact and not is_finite(flat)):
            coded.states.restore()
            return False
        self._exchanged = coded
        self._kept_means += 1
        return True

    def _agree(self, text: str, problem: Exception | None, *, is_sound: bool) -> bool:
        """Return whether the tensors and states of all ranks are sound; raise on all ranks if one cannot go on."""
        row = torch.tensor([*hashlib.sha256(text.encode()).digest(), problem is None, is_sound], dtype=torch.uint8)
        rows = self._gather(row)
        if not bool(rows[:, -2].all()):
            raise self._cannot(self._gather_texts("" if problem is None else _text_of(problem))) from problem
        if not bool((rows[:, :-2] == rows[0, :-2]).all()):
            raise self._differ([each.split("\n") for each in self._gather_texts(text)])
        return bool(rows[:, -1].all())

    def _cannot(self, texts: list[str]) -> ConfigError:
        """Return the error of the ranks that cannot exchange what they were given."""
        first = next(text for text in texts if text)
        ranks = [rank for rank, text in zip(self._group.ranks, texts, strict=True) if text == first]
        return ConfigError(f"{name_ranks(ranks)}: {first}")

    def _differ(self, texts: list[list[str]]) -> Mismatch:
        """Return the error of ranks that are about to do different things."""
        rank = next(rank for rank, lines in enumerate(texts) if lines != texts[0])
        here, there = sorted(set(texts[0]) - set(texts[rank])), sorted(set(texts[rank]) - set(texts[0]))
        return Mismatch(
            f"rank {self._group.ranks[0]} has {', '.join(here[:3]) or 'no other tensor'}, "
            f"rank {self._group.ranks[rank]} {', '.join(there[:3]) or 'no other tensor'}",
            rank=self._group.rank,
            operation=_OPERATION,
            remedy="give the same names, shapes and dtypes on all ranks, and load and roll back on all of them",
        )

    def _gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        encoded = text.encode()
        lengths = self._gather(torch.tensor([len(encoded)], dtype=torch.int64)).flatten().tolist()
        padded = torch.tensor([*encoded.ljust(max(_LEAST_BYTES, *lengths))], dtype=torch.uint8)
        rows = self._gather(padded)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks."""
        results: list[torch.Tensor] = []

        def begin() -> Reduction:
            return (yield Message(row, "all_gather"))

        self._run([SegmentWork(begin, results.append, self._group)])
        return results[0]

    def _run(self, items: list[SegmentWork]) -> None:
        try:
            self._thread.submit(items).wait()
        except RuntimeError as problem:
            raise CommError(
                str(problem),
                rank=self._group.rank,
                operation=_OPERATION,
                remedy="look for the first failure, and make a new session by a route that is open",
            ) from problem


def _kind(each: Any) -> str:
    if not isinstance(each, torch.Tensor):
        return f"of type {type(each).__name__}"
    layout = "" if each.layout == torch.strided else f" {str(each.layout).removeprefix('torch.')}"
    return f"{list(each.shape)} {each.dtype}{layout} on {each.device.type}"


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether it has its float32 numbers here, in CPU memory."""
    local = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return local and tensor.dtype == torch.float32 and tensor.is_cpu and tensor.layout == torch.strided


def _text_of(problem: Exception) -> str:
    """Return what the other ranks are told."""
    return str(problem) if isinstance(problem, FarandoleError) else f"{type(problem).__name__}: {problem}"
