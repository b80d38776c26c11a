"""No codec and no bucket on a device asks the host for a number of it.

Tensors are on the device "meta", which has shapes and no numbers: a number that is asked for is an error, and
copies between it and the CPU are counted.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from farandole.comm.autotune.probe import ProbeRequest
from farandole.comm.codecs.registry import make_codec, runs_on_devices
from farandole.comm.codecs.sparse_low_rank import Positions
from farandole.comm.device.streams import simulate_device
from farandole.comm.engine.bucket import Bucket, DenseBucket
from farandole.comm.engine.coded_bucket import DeviceCodedBucket
from farandole.comm.engine.parameters import layout_of
from farandole.comm.messages import Message, received_shape
from farandole.comm.routes import Route
from farandole.comm.transport import staged_conductor
from farandole.comm.transport.rank_group import RankGroup
from farandole.comm.transport.staged_conductor import StreamConductor
from farandole.core.vocabulary.codec_spec import EXACT, CodecSpec

META = torch.device("meta")
SPECS = [
    "bf16", "fp16", "fp8", "int8", "int4", "int8:rounding=stochastic", "sign", "int8:feedback=false", "topk:0.01",
    "topk:0.3", "topk:0.01,momentum=0.9,clip_norm=1.0", "randomk:0.01", "powersgd:4",
]  # fmt: skip


class _Copy:
    has_arrived = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def read(self) -> torch.Tensor:
        return torch.ones(self._tensor.shape, dtype=self._tensor.dtype)


class _Streams:
    """See `Streams`: copies of its own are those that nobody waits for."""

    current, side, copies, operations, model = "main", "side", "copies", "operations", "meta"

    @contextmanager
    def on(self, stream: str) -> Generator[None, None, None]:
        yield

    def record(self) -> str:
        return "event"

    def wait(self, event: str) -> None:
        pass

    def has_passed(self, event: str) -> bool:
        return True

    def mark(self) -> float:
        return 0.0

    def seconds_between(self, first: float, last: float) -> float:
        return last - first

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def to_host(self, tensor: torch.Tensor) -> _Copy:
        return _Copy(tensor)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=META)


class _Copies(TorchDispatchMode):
    """Counts copies between the device and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operations += func.overloadpacket.__name__ != "detach"
        devices = {each.device.type for each in args if isinstance(each, torch.Tensor) and each.dim()}
        if "device" in kwargs and kwargs["device"] is not None and args and isinstance(args[0], torch.Tensor):
            devices.add(torch.device(kwargs["device"]).type)
        if func.overloadpacket.__name__ in ("copy_", "_to_copy") and len(devices) > 1:
            self.found.append(str(func))
        return func(*args, **kwargs)


def _gathered(message: Message, seat: Any, group: Any) -> torch.Tensor:
    return message.tensor.new_empty(received_shape(message, seat))


def _step(
    bucket: Bucket,
    route: Route,
    parameters: list[nn.Parameter],
    number: int,
    gradients: Sequence[torch.Tensor] | None = None,
) -> None:
    for parameter, gradient in zip(parameters, gradients or map(torch.empty_like, parameters), strict=True):
        parameter.grad = gradient
    bucket.load(0.5)
    bucket.mark_steps(number)
    if isinstance(bucket, DeviceCodedBucket):
        bucket.launch(route).wait()
    assert bucket.late_steps is not None
    bucket.finalize()


@contextmanager
def _on_meta(codec: str, members: int, patch: pytest.MonkeyPatch) -> Generator[_Copies, None, None]:
    """Do two steps of a bucket of `members`, after one that makes what is made once; see what they do."""
    patch.setattr(staged_conductor, "exchange_by_group", _gathered)
    spec = EXACT if codec == "none" else CodecSpec.parse(codec)
    made = make_codec(spec)  # tries native loops, on real tensors
    streams: Any = _Streams()
    simulate_device(META, streams)
    try:
        route = Route(
            "flat", "", cast("Any", None), RankGroup((0, 1), 0), RankGroup((0,), 0),
            on_device=StreamConductor(streams, cast("Any", object())),
        )  # fmt: skip
        parameters = [nn.Parameter(torch.empty(256, 256, device=META)) for _ in range(members)]
        layouts, numbers = [layout_of(parameter) for parameter in parameters], list(range(members))
        bucket: Bucket
        if codec == "none":
            bucket = DenseBucket(numbers, parameters, layouts, 2)
        else:
            bucket = DeviceCodedBucket(
                numbers, parameters, layouts, made, lines=route, probe_request=ProbeRequest(), streams=streams
            )
        _step(bucket, route, parameters, 0)
        gradients = [torch.empty_like(each) for each in parameters]
        with _Copies() as copies:
            for number in (1, 2):
                _step(bucket, route, parameters, number, gradients)
        yield copies
    finally:
        simulate_device(META, None)


@pytest.mark.parametrize("codec", ["none", *SPECS])
def test_a_step_asks_for_no_number(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with _on_meta(codec, 3, monkeypatch) as copies:
        assert copies.found == []


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_bucket_of_many_gradients_is_told_in_as_many_operations(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host needs microseconds for each, and a model has hundreds of gradients."""
    told = []
    for members in (3, 48):
        with _on_meta(codec, members, monkeypatch) as copies:
            told.append(copies.operations)
    assert told[0] == told[1]


def test_what_runs_on_devices() -> None:
    for text in SPECS:
        assert runs_on_devices(CodecSpec.parse(text)), text
    for text in ("threshold:0.1", "auto", "tests.ranks.test_coded_engine.half"):
        assert not runs_on_devices(CodecSpec.parse(text)), text


@pytest.mark.parametrize("count", [1, 100, 5000, 65_535, 65_536, 200_001])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 1.0])
def test_positions_are_written_as_on_the_cpu(count: int, share: float) -> None:
    kept = max(1, int(count * share))
    generator = torch.Generator().manual_seed(count)
    where = torch.randperm(count, generator=generator)[:kept].sort().values
    coding = Positions(count, kept)
    expected = coding.encode(where.numpy())
    found = torch.zeros(coding.nbytes, dtype=torch.uint8)
    coding.encode_on_device(where, found)
    assert found.tolist() == expected.tolist()
    values, total = torch.randn(kept, generator=generator), torch.zeros(count)
    coding.add_on_device(found, values, total)
    assert torch.equal(total, torch.zeros(count).index_copy_(0, where, values))
