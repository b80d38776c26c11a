"""Meetings of ranks that train on their own: what is sent of the model, and what becomes of it when it is back.

[Note: the delta rule] When a part arrives that was sent some steps ago, a rank's parameters move by what the outer
step moved, counted from what it sent: the steps that it made meanwhile stay, and the mean over the ranks is that
of the outer step. Where no step was made meanwhile they become the averaged parameters to the bit.

One rule (DiLoCo, Douillard 2311.08105, algorithm 1, with torch's form of Nesterov) has local SGD and post-local
SGD (rate 1, no momentum), BMUF and Lookahead as special cases.

[Note: sign of a change] A change is what was before minus what is now, so that it stands where a gradient would: a
rank that stepped down a gradient has a change along it, and the outer step subtracts it.
"""

from __future__ import annotations

import hashlib
import math
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..comm.codecs.codec import is_finite
from ..comm.codecs.registry import can_have
from ..comm.device.streams import OtherThread
from ..comm.engine.codec_session import CodecSession
from ..comm.engine.parameters import ExtraTensors
from ..comm.messages import bit_sums, bytes_of
from ..comm.routes import Route, connect_route
from ..comm.world.comm_errors import translated
from ..comm.world.world import World
from ..core.link import ring_factor
from ..core.vocabulary.codec_spec import CodecSpec
from ..core.vocabulary.errors import CommError, ConfigError, Mismatch
from ..core.vocabulary.events import SETUP_APART, SETUP_MEETINGS, SETUP_SYNC, Exchange, Setup, SetupValue
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import SyncSpec
from ..core.vocabulary.text import write_notice

# Parts of a model that meet together: which parameters they have, and what is kept between meetings.
Means = dict[str, torch.Tensor] | None
"""Mean changes by name; None: no rank had a sample."""


@dataclass(eq=False)
class Fragment:
    """Parameters that meet together."""

    number: int
    parameters: Mapping[str, torch.Tensor]
    """By name: the model's own."""
    outer: list[torch.Tensor] = field(default_factory=list)
    """The averaged ones, after the last meeting."""
    velocity: list[torch.Tensor] = field(default_factory=list)
    sent: list[torch.Tensor] = field(default_factory=list)
    """What the parameters were when they were sent, while the mean is on its way."""
    means: Future[Means] | None = None
    sent_at: int = 0
    """The step after which they were sent last."""
    weight_at: float = 0.0
    """What the rank's samples had added up to then."""


def deal_fragments(model: nn.Module, optimizers: Sequence[Optimizer], spec: SyncSpec, text: str) -> list[Fragment]:
    """Deal the parameters that train to the fragments of `spec`, each to the one with least bytes.

    Neighbours in the model come into different fragments: as the strided ones of 2501.18512. `text`: the
    plan's key. Raises `ConfigError` for more fragments than parameters.
    """
    stepped = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    found = {name: each for name, each in model.named_parameters() if each.requires_grad and id(each) in stepped}
    if len(found) < spec.fragments:
        raise ConfigError(
            f'plan: sync = "{text}" has {spec.fragments} fragments, but {len(found)} parameters train',
            remedy="set fewer fragments",
        )
    dealt: list[dict[str, torch.Tensor]] = [{} for _ in range(spec.fragments)]
    loads = [0] * spec.fragments
    for name, each in found.items():
        least = min(range(len(loads)), key=loads.__getitem__)
        dealt[least][name] = each
        loads[least] += each.nbytes
    return [Fragment(number, each) for number, each in enumerate(dealt)]


# Running statistics and other buffers that change, where ranks train on their own: averaged at meetings.
class LocalBuffers:
    """The buffers of one model. To be made by all ranks."""

    def __init__(self, model: nn.Module, extra: ExtraTensors | None, here: World) -> None:
        """`extra`: which buffers travel, and how; None: none do."""
        self._model, self._extra, self._here = weakref.ref(model), extra, here
        self._travels: bool | None = None
        """Whether some do; None: it is not agreed on yet."""
        self._averaged: dict[str, torch.Tensor] = {}

    def meet(self, weight: float) -> None:
        """Average them; to be called by all ranks. `weight`: this rank's share of the samples."""
        if self._extra is None or self._here.size == 1:
            return
        if self._travels is None:
            self._travels = self._extra.prepare()
        if not self._travels:
            return
        flat = self._extra.pack(weight / self._here.size)
        with translated(self._here, "mean of buffers"):
            dist.all_reduce(flat, group=self._here.group)
        self._extra.unpack()
        model = self._model()
        if model is not None:
            self._averaged = {
                name: each.detach().clone() for name, each in model.named_buffers() if each.is_floating_point()
            }

    def averaged(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the model's buffers, each with what it was after the last meeting."""
        model = self._model()
        buffers = {} if model is None else dict(model.named_buffers())
        return [(buffers[name], value) for name, value in self._averaged.items() if name in buffers]


# The outer step: what becomes of the averaged parameters when the mean change of the ranks is known.
@torch.no_grad()
def outer_step(
    outer: Sequence[torch.Tensor], velocity: Sequence[torch.Tensor], change: Sequence[torch.Tensor], spec: SyncSpec
) -> None:
    """Apply the mean `change` of the ranks to `outer`, in place. See [Note: sign of a change].

    Args:
        outer: the averaged parameters; tensors of any floating dtype.
        velocity: the outer momentum, of the same shapes, updated in place; empty where `spec.momentum` is 0.
        change: of the same shapes; overwritten.
        spec: rate, momentum and its form.
    """
    if not outer:
        return
    if not spec.momentum:
        torch._foreach_add_(list(outer), list(change), alpha=-spec.outer_lr)
        return
    torch._foreach_mul_(list(velocity), spec.momentum)
    torch._foreach_add_(list(velocity), list(change))
    if spec.nesterov:
        torch._foreach_add_(list(change), list(velocity), alpha=spec.momentum)
        torch._foreach_add_(list(outer), list(change), alpha=-spec.outer_lr)
    else:
        torch._foreach_add_(list(outer), list(velocity), alpha=-spec.outer_lr)


class Meetings:
    """What the ranks of one model exchange, and when. To be made by all of them."""

    def __init__(
        self,
        here: World,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        buffers: ExtraTensors | None,
    ) -> None:
        """`buffers`: what travels with each meeting over the first part of the model."""
        self._here, self._plan, self._spec = here, plan, SyncSpec.parse(plan.sync)
        self.number = 0
        """Those that have begun."""
        self._arrived, self._apart = 0, 0.0
        """Parts that arrived in this process, and the sum of how far they were from the ranks' mean."""
        self.fragments = deal_fragments(model, optimizers, self._spec, plan.sync)
        codec = CodecSpec.parse(self._spec.codec(plan.codec))
        self._exchange = ChangeExchange(here, [each.parameters for each in self.fragments], plan, codec)
        self._buffers = LocalBuffers(model, buffers, here)
        self._thread = ThreadPoolExecutor(1, "farandole-meeting") if self._spec.overlap else None
        if not self._spec.first:
            here.session.recorder.record(Setup({SETUP_SYNC: self._spec.to_text(), SETUP_MEETINGS: 0}))

    def begin(self, step: int) -> None:
        """The parameters as they are, equal on all ranks, are the averaged ones after local step `step`."""
        for each in self.fragments:
            each.outer = [parameter.detach().clone() for parameter in each.parameters.values()]
            each.velocity = [torch.zeros_like(outer) for outer in each.outer] if self._spec.momentum else []
            each.sent, each.means = [], None
            each.sent_at, each.weight_at = step, 0.0

    def after_step(self, step: int, weight: float, optimizers: Sequence[Optimizer]) -> None:
        """Make outer steps with what has arrived, and send what it is time for.

        Args:
            step: local steps of this rank.
            weight: what its samples add up to.
            optimizers: those of the model.
        """
        for each in self.fragments:
            if each.means is not None and step - each.sent_at >= self._spec.overlap:
                self._arrive(each, step, optimizers)
        for number in self._spec.sends(step):
            self._send(self.fragments[number], step, weight)
            if not self._spec.overlap:
                self._arrive(self.fragments[number], step, optimizers)

    def drain(self, step: int, weight: float, optimizers: Sequence[Optimizer]) -> None:
        """Meet over all that this rank has changed; to be called by all of them after as many steps."""
        for each in self.fragments:
            if each.means is not None:
                self._arrive(each, step, optimizers)
        for each in self.fragments:
            if step > each.sent_at:
                self._send(each, step, weight)
                self._arrive(each, step, optimizers)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have the averaged parameters and buffers; afterwards its own again, to the bit."""
        averaged = self._buffers.averaged()
        for part in self.fragments:
            averaged += zip(part.parameters.values(), part.outer, strict=True)
        own = [each.detach().clone() for each, _ in averaged]
        with torch.no_grad():
            for each, value in averaged:
                each.copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for (each, _), value in zip(averaged, own, strict=True):
                    each.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept between meetings, right after `drain`."""
        velocity = {
            name: value
            for part in self.fragments
            for name, value in zip(part.parameters, part.velocity, strict=False)
        }
        return {"meetings": self.number, "velocity": velocity, "codecs": self._exchange.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, after `begin`. What is not in it begins anew."""
        self.number = int(state.get("meetings", 0))
        for part in self.fragments:
            for name, velocity in zip(part.parameters, part.velocity, strict=False):
                if name in state.get("velocity", {}):
                    velocity.copy_(state["velocity"][name])
        self._exchange.load_state(state.get("codecs", {}))

    def close(self) -> None:
        """Close the connections, when what is on its way has arrived."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._exchange.close()

    def forget(self) -> None:
        """In a forked child: use no connection, and close none."""
        self._thread = None
        self._exchange.forget()

    # -- one part of the model -----------------------------------------------------------------

    @torch.no_grad()
    def _send(self, fragment: Fragment, step: int, weight: float) -> None:
        self.number += 1
        steps, share = step - fragment.sent_at, weight - fragment.weight_at
        fragment.sent_at, fragment.weight_at = step, weight
        fragment.sent = [each.detach().clone() for each in fragment.parameters.values()]
        changes = {
            name: outer - sent
            for name, outer, sent in zip(fragment.parameters, fragment.outer, fragment.sent, strict=True)
        }
        meeting = Meeting(self.number, steps, fragment.number, digest_of(fragment.outer), share)
        order = None if self._thread is None else OtherThread.of(fragment.outer[0].device)

        def exchange() -> Means:
            begin = time.monotonic()
            if order is not None:
                order.begin()
            means = self._exchange.mean(changes, meeting)
            if order is not None:
                order.end()
            end = time.monotonic()
            wait_begin = begin if self._thread is None else end
            self._here.session.recorder.record(Exchange((begin,), wait_begin, end, self._exchange.sent_bytes))
            return means

        if self._thread is not None:
            fragment.means = self._thread.submit(exchange)
        else:
            fragment.means = Future()
            fragment.means.set_result(exchange())

    @torch.no_grad()
    def _arrive(self, fragment: Fragment, step: int, optimizers: Sequence[Optimizer]) -> None:
        """Make the outer step with the mean that was sent for. See [Note: the delta rule]."""
        assert fragment.means is not None, "it was sent"
        means = fragment.means.result()
        fragment.means = None
        if fragment.number == 0:
            self._buffers.meet(self._here.session.batch_weight.factor)
        if means is None:
            return
        if self._thread is not None:
            OtherThread.take(means.values())
        if not all(is_finite(each) for each in means.values()) and self._drops(fragment, optimizers):
            return
        self._note(fragment, means)
        outer_step(fragment.outer, fragment.velocity, [means[name] for name in fragment.parameters], self._spec)
        for parameter, outer, sent in zip(
            fragment.parameters.values(), fragment.outer, fragment.sent, strict=True
        ):
            if step > fragment.sent_at:
                parameter.add_(outer - sent)
            else:
                parameter.copy_(outer)
        fragment.sent = []

    def _note(self, fragment: Fragment, means: Mapping[str, torch.Tensor]) -> None:
        """Record how many meetings there were, and how far this rank was from the mean of all ranks."""
        away = norm = 0.0
        for name, outer, sent in zip(fragment.parameters, fragment.outer, fragment.sent, strict=True):
            mean = outer - means[name]
            away += float(torch.linalg.vector_norm(sent - mean)) ** 2
            norm += float(torch.linalg.vector_norm(mean)) ** 2
        self._arrived += 1
        self._apart += (away / norm) ** 0.5 if norm else 0.0
        apart = self._apart / self._arrived
        facts: dict[str, SetupValue] = {
            SETUP_SYNC: self._spec.to_text(), SETUP_MEETINGS: self._arrived // len(self.fragments),
            SETUP_APART: apart if math.isfinite(apart) else None,
        }  # fmt: skip
        self._here.session.recorder.record(Setup(facts))

    def _drops(self, fragment: Fragment, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether a mean with NaN is not used: the ranks go back to the averaged parameters."""
        if self._plan.nonfinite == "raise":
            raise CommError(
                "parameters of some rank hold NaN or infinity",
                rank=self._here.job_rank,
                operation=f"meeting {self.number}",
                remedy='lower the learning rate, or set nonfinite = "skip"',
            )
        if self._plan.nonfinite != "skip":
            return False
        names = []
        for (name, parameter), outer in zip(fragment.parameters.items(), fragment.outer, strict=True):
            if not is_finite(parameter):
                names.append(name)
                for optimizer in optimizers:
                    optimizer.state.pop(parameter, None)  # its moments hold NaN, too
            parameter.copy_(outer)
        own = f" (here {names[0]!r}, whose optimizer state begins anew)" if names else ""
        write_notice(
            f"warning: meeting {self.number}: parameters of some rank hold NaN or infinity{own}: all go back to "
            "the averaged ones"
        )
        return True


# The mean of the ranks' changes: agree on what is exchanged, weigh it, exchange it by a codec or exactly.
#
# [Note: a meeting is agreed on] Ranks come to a meeting after steps of their own, so nothing but their own counts
# says that they mean the same one. Before anything is exchanged each rank says which meeting it is at, after how
# many steps, with which parameters, and a digest of the averaged parameters that it has. Where these differ all
# ranks raise, and nothing was exchanged.


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
    """Return a number that tells whether ranks have other values: of the bits of all elements."""
    return _digest(bytes_of(bit_sums(tensors).cpu()).numpy().tobytes())


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:_DIGEST_BYTES], "big")
