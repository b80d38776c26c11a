"""Several pretend ranks on one device: the engine's buckets and both of its waits, messages in lock step.

No backend takes two ranks on one GPU. Here one process has the buckets of all of them, and runs the codecs' rounds
by the simulator, on the side stream; everything else is what a rank does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from ...comm.autotune.probe_request import ProbeRequest
from ...comm.buckets.device_coded_bucket import DeviceCodedBucket
from ...comm.codecs.registry import make_codec
from ...comm.device.streams import Streams, streams_of
from ...comm.gradients.parameters import layout_of
from ...comm.messages.simulator import simulate
from ...comm.routes.route import Route
from ...comm.sessions import saved_state
from ...comm.transport.comm_thread import SegmentWork
from ...comm.transport.rank_group import RankGroup
from ...comm.transport.stream_conductor import StreamConductor, StreamWork
from ...core.vocabulary.codec_spec import CodecSpec
from .script import Played, Replica, Script, play, replicas_of

_NO_GROUP = cast("Any", None)
"""In place of the backend's group, which no message goes by here."""


class LockStepConductor(StreamConductor):
    """Drives the buckets of `size` pretend ranks together, when the last of them is submitted."""

    def __init__(self, streams: Streams, size: int) -> None:
        super().__init__(streams, None)
        self._size = size
        self._submitted: list[tuple[Sequence[SegmentWork], Callable[[], None], StreamWork, Any]] = []

    def submit(
        self,
        items: Sequence[SegmentWork],
        complete: Callable[[], None],
        prepare: Callable[[], object] | None = None,
    ) -> StreamWork:
        """Keep one rank's bucket, in the order of ranks; drive all when they are complete."""
        assert prepare is None, "pretend ranks are on no host"
        work = StreamWork(self.streams)
        self._submitted.append((items, complete, work, self.streams.record()))
        if len(self._submitted) == self._size:
            by_rank, self._submitted = self._submitted, []
            with self._on_side([ready for *_, ready in by_rank], [work for _, _, work, _ in by_rank]):
                for at_once in zip(*(items for items, *_ in by_rank), strict=True):
                    results = simulate([cast("Any", item.begin()) for item in at_once]).results
                    for item, result in zip(at_once, results, strict=True):
                        item.finish(result)
                for _, complete_rank, *_ in by_rank:
                    complete_rank()
        return work


class LockStepExchange:
    """A `ReplicaExchange` by the buckets of a device."""

    def __init__(self, spec: CodecSpec, replicas: Sequence[Replica], device: torch.device) -> None:
        streams = streams_of(device)
        assert streams is not None, "without streams there are no buckets of a device"
        self._spec, self._replicas, self._device, self._streams = spec, replicas, device, streams
        self._exchanges = 0
        ranks = tuple(range(len(replicas)))
        conductor = LockStepConductor(streams, len(replicas))
        self._routes = [
            Route("flat", "in lock step", _NO_GROUP, RankGroup(ranks, rank), RankGroup((rank,), rank),
                  on_device=conductor)
            for rank in ranks
        ]  # fmt: skip
        self._make_buckets()

    def local(self) -> AbstractContextManager[Any]:
        """See `ReplicaExchange`."""
        return nullcontext()

    def finish(self, change: float) -> None:
        """See `ReplicaExchange`."""
        self._exchanges += 1
        for bucket in self._buckets:
            if change != 1.0:
                bucket.rescale(change)
            bucket.load(1 / len(self._buckets))
            bucket.mark_steps(self._exchanges)
        works = [bucket.launch(route) for bucket, route in zip(self._buckets, self._routes, strict=True)]
        for work in works:
            work.wait()
        for bucket in self._buckets:
            bucket.finalize()

    def reload(self) -> None:
        """See `ReplicaExchange`."""
        names = [name for name, _ in self._replicas[0].model.named_parameters()]
        saved = [saved_state.export(bucket.coded, names) for bucket in self._buckets]
        for replica in self._replicas:
            replica.renew(self._device)
        self._make_buckets()
        for bucket, entries in zip(self._buckets, saved, strict=True):
            saved_state.restore([(bucket.coded, names)], entries)

    def residuals(self) -> list[list[torch.Tensor]]:
        """See `ReplicaExchange`."""
        return [bucket.coded.unsent() for bucket in self._buckets]

    def _make_buckets(self) -> None:
        self._buckets: list[DeviceCodedBucket] = []
        for replica, route in zip(self._replicas, self._routes, strict=True):
            parameters = list(replica.model.parameters())
            self._buckets.append(
                DeviceCodedBucket(
                    list(range(len(parameters))), parameters, [layout_of(each) for each in parameters],
                    make_codec(self._spec), lines=route, probe_request=ProbeRequest(), streams=self._streams,
                )
            )  # fmt: skip


def play_in_lock_step(
    script: Script,
    spec: CodecSpec,
    size: int,
    device: torch.device,
    after_first: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Played]:
    """Return what each of `size` pretend ranks on `device` ends with. `after_first`: see `play`."""
    replicas = replicas_of(range(size), device)
    exchange = LockStepExchange(spec, replicas, device)
    return play(script, replicas, exchange, size=size, device=device, after_first=after_first)
