"""The mean of the ranks' changes: agree on what is exchanged, weigh it, exchange it by a codec or exactly.

[Note: a meeting is agreed on] Ranks come to a meeting after steps of their own, so nothing but their own counts
says that they mean the same one. Before anything is exchanged each rank says which meeting it is at, after how
many steps, with which parameters, and a digest of the averaged parameters that it has. Where these differ all
ranks raise, and nothing was exchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..comm.codecs.codec import is_finite
from ..comm.codecs.eligibility import can_have
from ..comm.messages import bytes_of
from ..comm.routes import Route, connect_route
from ..comm.sessions.session import CodecSession
from ..comm.world.comm_errors import translated
from ..comm.world.world import World
from ..core.step_model.link import ring_factor
from ..core.vocabulary.codec_spec import CodecSpec
from ..core.vocabulary.errors import Mismatch
from ..core.vocabulary.spec import Plan

_SAMPLED_ELEMENTS = 256
"""That a digest has of each end of a tensor."""
_DIGEST_BYTES = 6
"""Whole numbers of so many bytes are exact in float64."""


@dataclass(frozen=True)
class Meeting:
    """What ranks must have in common to exchange changes."""

    number: int
    """Counts from 1."""
    steps: int
    """Those of this rank since the last meeting over these parameters."""
    fragment: int
    """Which part of the model it is over."""
    digest: int
    """That of the averaged parameters, see `digest_of`."""
    weight: float
    """How much this rank's samples count, which may differ between ranks."""


class ChangeExchange:
    """Exchanges changes of parameters among `here`'s ranks. To be made by all of them."""

    def __init__(
        self, here: World, fragments: Sequence[Mapping[str, torch.Tensor]], plan: Plan, codec: CodecSpec
    ) -> None:
        """Connect. Codecs work in CPU memory, where changes on a device are copied to and means from."""
        self._here, self._codec, self._fragments = here, codec, [list(each) for each in fragments]
        parameters = {name: tensor for each in fragments for name, tensor in each.items()}
        coded = [name for name, each in parameters.items() if not codec.is_exact and can_have(each, codec)]
        self._coded = frozenset(coded)
        self._route: Route | None = None
        self._sessions: list[CodecSession] = []
        """By fragment; none where nothing is coded."""
        if here.size > 1:
            nbytes, flat = sum(each.nbytes for each in parameters.values()), replace(plan, route="flat")
            self._route = connect_route(here, flat, needs_messages=bool(coded), parameter_bytes=nbytes)
            if coded:
                self._sessions = [CodecSession(self._route, codec) for _ in fragments]
        self.sent_bytes = 0
        """By this rank in the last exchange, by the formulas of all-reduce and codec."""

    def mean(self, changes: Mapping[str, torch.Tensor], meeting: Meeting) -> dict[str, torch.Tensor] | None:
        """Return the mean of the ranks' changes over their samples, with the same bits on all ranks.

        Args:
            changes: by name, of any floating dtype; not changed.
            meeting: what the ranks compare first.

        Returns:
            By name, new tensors; all NaN where a change of some rank is not finite, and then codecs keep what
            they had. None if no rank has a sample.

        Raises:
            Mismatch: on all ranks, where they mean different meetings; nothing was exchanged.
            CommError: an exchange failed.
        """
        weights = self._agree(meeting, list(changes))
        total = sum(weights)
        if not total:
            return None
        factor = meeting.weight * self._here.size / total
        is_coded = self._coded if self._sessions else ()
        # A rank without samples may hold anything.
        coded = {name: (each * factor if factor else torch.zeros_like(each)).cpu()
                 for name, each in changes.items() if name in is_coded}  # fmt: skip
        plain = {name: each for name, each in changes.items() if name not in is_coded}
        means = self._exact(plain, factor)
        all_finite = all(is_finite(each) for each in means.values())
        self.sent_bytes = round(sum(tensor.nbytes for tensor in plain.values()) * self._sent_share)
        if coded:
            session = self._sessions[meeting.fragment]
            found = session.mean(coded)
            were_finite = all(is_finite(each) for each in found.values())
            if were_finite and not all_finite:
                session.rollback()
            all_finite = all_finite and were_finite
            means |= {name: each.to(changes[name].device) for name, each in found.items()}
            self.sent_bytes += round(sum(map(self._coded_bytes, coded.values())) * self._sent_share)
        if not all_finite:
            for each in means.values():
                each.fill_(torch.nan)
        return {name: means[name] for name in changes}

    def state(self) -> dict[str, Any]:
        """Return what the codec keeps on this rank, by name."""
        return {name: entry for each in self._sessions for name, entry in each.state().items()}

    def load_state(self, entries: Mapping[str, Any]) -> None:
        """Replace it; names that are not in it begin anew. To be called by all ranks."""
        for session, names in zip(self._sessions, self._fragments, strict=False):
            session.load_state({name: entries[name] for name in names if name in entries})

    def close(self) -> None:
        """Close the connections."""
        route, self._route = self._route, None
        self._sessions.clear()
        if route is not None:
            route.close(self._here)

    def forget(self) -> None:
        """In a forked child: use no connection, and close none."""
        self._route = None
        self._sessions.clear()

    # -- parts of an exchange ------------------------------------------------------------------

    @property
    def _sent_share(self) -> float:
        """Bytes that a rank sends for each of a tensor, by ring or by exchange and gather."""
        return ring_factor(self._here.size)

    def _coded_bytes(self, tensor: torch.Tensor) -> float:
        rows = tensor.shape[0]
        each = self._codec.bytes_per_element(rows, tensor.numel() / rows, ranks=self._here.size)
        return tensor.numel() * (4.0 if each is None else each)

    def _agree(self, meeting: Meeting, names: Sequence[str]) -> list[float]:
        """Return the ranks' weights. See [Note: a meeting is agreed on]."""
        if self._here.size == 1:
            return [meeting.weight]
        mine = [float(meeting.number), float(meeting.steps), float(_digest("\n".join(names).encode())),
                float(meeting.digest)]  # fmt: skip
        own = torch.tensor([*mine, meeting.weight], dtype=torch.float64, device=self._here.device)
        table = [torch.empty_like(own) for _ in range(self._here.size)]
        with translated(self._here, f"meeting {meeting.number}"):
            dist.all_gather(table, own, group=self._group)
        rows = [row.tolist() for row in table]
        labels = ("its meeting", "its steps since the last one", "parameters that train", "averaged parameters")
        for place, label in enumerate(labels):
            values = [row[place] for row in rows]
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                ranks = self._here.job_ranks
                shown = f": {values[0]:.0f} on rank {ranks[0]}, {values[other]:.0f} on rank {ranks[other]}"
                what = shown if place < 2 else f" on ranks {ranks[0]} and {ranks[other]}"
                raise Mismatch(
                    f"ranks that train on their own differ in {label}{what}",
                    rank=self._here.job_rank,
                    operation=f"meeting {meeting.number}",
                    remedy="give all ranks as many batches (farandole.shard does), and change, freeze and load "
                    "parameters on all ranks alike",
                )
        return [row[-1] for row in rows]

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return None if self._route is None else self._route.group

    def _exact(self, changes: Mapping[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
        """Return the means of the backend's all-reduce, one for each dtype and device."""
        means: dict[str, torch.Tensor] = {}
        kinds = dict.fromkeys((each.dtype, each.device) for each in changes.values())
        for kind in kinds:
            names = [name for name, each in changes.items() if (each.dtype, each.device) == kind]
            share = factor / self._here.size
            flat = torch.cat([changes[name].reshape(-1) for name in names])
            flat = flat.mul_(share) if share else torch.zeros_like(flat)
            if self._here.size > 1:
                with translated(self._here, "mean of changes"):
                    dist.all_reduce(flat, group=self._group)
            for name, part in zip(names, flat.split([changes[name].numel() for name in names]), strict=True):
                means[name] = part.view(changes[name].shape).clone()
        return means


def digest_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return a number that tells whether ranks have other values: of some elements of each tensor, at its ends."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        ends = torch.cat([flat[:_SAMPLED_ELEMENTS], flat[-_SAMPLED_ELEMENTS:]])
        digest.update(bytes_of(ends.cpu()).numpy().data)
    return int.from_bytes(digest.digest()[:_DIGEST_BYTES], "big")


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:_DIGEST_BYTES], "big")
