"""The plan of a job reaches the optimizer of Horovod's names: each flag is followed to the bytes on the link."""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import socket
import struct
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
import farandole.horovod.torch as hvd
from farandole.cli.commands.run import make_parser
from farandole.cli.options.horovod_settings import read_settings
from farandole.comm.transport.comm_thread import CommThread
from farandole.core.host.open_sockets import borrowed, open_sockets
from farandole.core.job_plan import read_plan
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.events import BucketLayout, Event
from farandole.horovod.common.basics import basics
from farandole.horovod.torch.compression import NoneCompressor
from tests.ranks.pool import ranks, takes

WIDTH = 256
LAYER_BYTES = 4 * WIDTH * WIDTH
LAYERS = 4
_SENT_AND_AGAIN = struct.Struct("=QQ"), 200
"""Bytes sent, and of these again, in Linux's `struct tcp_info`."""
TWO_HOSTS = {"FARANDOLE_LOCAL_SIZE": "2", "FARANDOLE_NODE_COUNT": "2"}


_directories: list[Path] = []
"""Of the plan that this process read last."""


def _forget() -> None:
    while _directories:
        shutil.rmtree(_directories.pop())


basics.call_on_shutdown(_forget)


def launch(*words: str) -> None:
    """Give this rank what `farandole run` gives it for these words: the plan's file, and variables."""
    _forget()
    options = make_parser().parse_args([*words, "--", "train.py"])
    settings = read_settings(options)
    plan = read_plan(options.plan, options.settings, settings.plan)
    os.environ.update(settings.environment)
    if plan is not None:
        directory = Path(tempfile.mkdtemp(prefix="farandole-test-"))
        (directory / "plan.toml").write_text(plan.to_toml())
        os.environ["FARANDOLE_PLAN"] = str(directory / "plan.toml")
        _directories.append(directory)


def sent_bytes() -> int:
    """Return what this process's connections have sent, by the kernel's count."""
    total = 0
    for descriptor, _ in open_sockets():
        with contextlib.suppress(OSError), borrowed(descriptor) as connection:  # another thread may close it
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                sent, again = _SENT_AND_AGAIN[0].unpack_from(info, _SENT_AND_AGAIN[1])
                total += sent - again
    return total


class Layouts:
    """Keeps the newest layout of buckets."""

    def __init__(self) -> None:
        self.newest: BucketLayout | None = None

    def record(self, event: Event) -> None:
        if isinstance(event, BucketLayout):
            self.newest = event


class Training:
    """A model of a few equal matrices, its optimizer, and what is seen of its exchanges."""

    def __init__(self, **keywords: Any) -> None:
        hvd.init()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.layouts = Layouts()
        fd.world().session.recorder = self.layouts
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), 0.01), self.model.named_parameters(), **keywords
        )

    def step(self) -> int:
        """Make one step; return the bytes that this rank sent for it."""
        hvd.barrier()
        before = sent_bytes()
        self.optimizer.zero_grad()
        self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        hvd.barrier()
        return sent_bytes() - before

    def share(self) -> float:
        """Return the bytes of a step beside those of the gradients in float32, in the second step."""
        self.step()
        return self.step() / (LAYERS * LAYER_BYTES)

    @property
    def layout(self) -> BucketLayout:
        assert self.layouts.newest is not None, "an reducer exchanged"
        return self.layouts.newest


@pytest.mark.gate_cases("-keywords7-named-none-1.0")
@pytest.mark.parametrize(
    ("words", "keywords", "route", "codec", "share"),
    [
        ("", {}, "shared", "none", 0.0),
        ("--hierarchical-allreduce", {}, "shared", "none", 0.0),  # on one host: inside it
        ("--set route=flat", {}, "flat", "none", 1.0),
        ("--set route=flat --set codec=int8", {}, "flat", "int8", 0.26),
        ("--set route=flat", {"compression": "fp16"}, "flat", "fp16", 0.5),
        ("--set route=flat --set codec=int8", {"compression": "int8"}, "flat", "int8", 0.26),
        ("--set codec=int8", {"groups": 2}, "named", "int8", 0.26),
        ("", {"groups": 2}, "named", "none", 1.0),
        ("", {"groups": 2, "compression": "fp16"}, "named", "fp16", 0.5),
    ],
)
@ranks(2)
def test_routes_and_codecs_to_the_bytes(
    words: str, keywords: dict[str, Any], route: str, codec: str, share: float
) -> None:
    launch(*words.split())
    if "compression" in keywords:
        keywords = {**keywords, "compression": getattr(hvd.Compression, keywords["compression"])}
    training = Training(**keywords)
    seen = training.share()
    assert share - 0.02 <= seen <= share + 0.04, seen
    if route != "named":
        assert training.optimizer._farandole_path == "reducer"
        assert training.layout.route == route
        assert {bucket.codec.partition(":")[0] for bucket in training.layout.buckets} == {codec}


@pytest.mark.full("further")
@ranks(4, HOROVOD_HIERARCHICAL_ALLREDUCE="1", **TWO_HOSTS)
@takes(60.0)  # four ranks take turns on the cores of a small machine
def test_hierarchy_by_a_variable_alone() -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    os.environ["FARANDOLE_LOCAL_RANK"], os.environ["FARANDOLE_NODE_RANK"] = str(rank % 2), str(rank // 2)
    training = Training()
    seen = training.share()
    assert training.layout.route == "hierarchical"
    assert 0.48 <= seen <= 0.56, seen  # each of both local ranks carries its half across


@pytest.mark.full("further")
@pytest.mark.parametrize(("words", "by_host"), [("", True), ("route=hierarchical", True), ("route=flat", False)])
@ranks(4, **TWO_HOSTS)
@takes(60.0)
def test_named_gradients_take_the_route_of_the_plan(words: str, *, by_host: bool) -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    os.environ["FARANDOLE_LOCAL_RANK"], os.environ["FARANDOLE_NODE_RANK"] = str(rank % 2), str(rank // 2)
    launch(*(["--set", words] if words else []))
    training = Training(groups=1)
    training.step()
    assert training.optimizer._farandole_path == "tensor"
    assert basics.running.engine.by_host == by_host


@pytest.mark.gate_cases("--fusion-threshold-mb 1-1")
@pytest.mark.parametrize(
    ("words", "buckets"),
    [
        ("--fusion-threshold-mb 1", 1),
        ("--fusion-threshold-mb 0", LAYERS),
        ("--set bucket_bytes=512KiB", 2),
    ],
)
@ranks(2)
def test_sizes_of_buckets(words: str, buckets: int) -> None:
    launch(*words.split())
    training = Training()
    training.step()
    assert len(training.layout.buckets) == buckets


@pytest.mark.gate_cases("--set bucket_bytes=262144-variables0")
@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (f"--set bucket_bytes={LAYER_BYTES}", {}),
        ("--fusion-threshold-mb 0", {}),
        ("", {"HOROVOD_FUSION_THRESHOLD": str(LAYER_BYTES)}),
    ],
)
@ranks(2)
def test_named_operations_that_do_not_travel_together(words: str, variables: dict[str, str]) -> None:
    launch(*words.split())
    os.environ.update(variables)
    hvd.init()
    submitted = []
    submit = CommThread.submit

    def counted(self: CommThread, *arguments: Any, **keywords: Any) -> Any:
        submitted.append(keywords)
        return submit(self, *arguments, **keywords)

    CommThread.submit = counted  # type: ignore[method-assign]
    try:
        handles = [hvd.allreduce_async(torch.ones(WIDTH, WIDTH), name=str(layer)) for layer in range(LAYERS)]
        for handle in handles:
            hvd.synchronize(handle)
    finally:
        CommThread.submit = submit  # type: ignore[method-assign]
    assert len(submitted) == LAYERS


@pytest.mark.gate_cases("HOROVOD_AUTOTUNE")
@pytest.mark.parametrize("how", ["--autotune", "HOROVOD_AUTOTUNE"])
@ranks(2)
def test_autotune_measures_the_link(how: str) -> None:
    launch("--set", "route=flat", *([how] if how.startswith("-") else []))
    if not how.startswith("-"):
        os.environ[how] = "1"
    training = Training()
    training.step()
    reducer = training.optimizer._exchange.reducer
    assert reducer.tuner is not None
    assert (reducer.plan.codec, reducer.plan.lossy) == ("auto", False)


@pytest.mark.full("further")
@ranks(2)
def test_time_outs_and_other_keys_reach_the_engine() -> None:
    launch(
        *["--stall-check-shutdown-time-seconds", "70", "--set", "connections=2", "--set", "nonfinite=raise"],
        *["--set", "first_bucket_bytes=300KiB", "--set", "route=flat", "--set", "codec=int8"],
    )
    training = Training()
    training.step()
    plan = training.optimizer._exchange.reducer.plan
    assert (plan.timeout_seconds, plan.connections, plan.nonfinite) == (70.0, 2, "raise")
    assert len(training.layout.buckets) == 2
    training.optimizer.zero_grad()
    with pytest.raises(hvd.HorovodInternalError, match=r"gradients of .* hold NaN or infinity on rank 1"):
        (training.model(torch.ones(1, WIDTH)).sum() * (1.0 if hvd.rank() == 0 else math.inf)).backward()


@pytest.mark.full("further")
@ranks(2)
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_plan_says() -> None:
    launch("--set", "timeout_seconds=0.5")
    training = Training(groups=1)
    if hvd.rank() == 1:
        time.sleep(2)
    with pytest.raises(hvd.HorovodStalledError):
        training.step()


@pytest.mark.full("further")
@ranks(2)
def test_a_step_that_the_plan_skips_changes_nothing() -> None:
    launch(*["--set", "nonfinite=skip", "--set", "route=flat", "--set", "codec=int8"])
    training = Training()
    training.step()
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.optimizer.param_groups[0]["weight_decay"] = 0.1
    training.optimizer.zero_grad()
    loss = training.model(torch.ones(1, WIDTH)).sum() * (1.0 if hvd.rank() == 0 else math.nan)
    if hvd.rank() == 1:
        with pytest.warns(RuntimeWarning, match="step skipped"):
            loss.backward()
    else:
        loss.backward()
    training.optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, training.model.parameters(), strict=True))
    training.step()
    assert not torch.equal(before[0], next(training.model.parameters()))


@pytest.mark.full("further")
@pytest.mark.parametrize("keywords", [{}, {"groups": 1}])
@ranks(2)
def test_gradients_are_clipped_as_the_plan_says(keywords: dict[str, Any]) -> None:
    launch("--set", "clip_norm=0.5")
    training = Training(**keywords)
    for closed in (False, True):
        before = [parameter.detach().clone() for parameter in training.model.parameters()]

        def closure() -> torch.Tensor:
            training.optimizer.zero_grad()
            loss: torch.Tensor = 1000 * training.model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            return loss

        if not closed:
            closure()
        training.optimizer.step(*([closure] if closed else []))
        moved = torch.cat([(a - b).ravel() for a, b in zip(before, training.model.parameters(), strict=True)])
        torch.testing.assert_close(moved.norm(), torch.tensor(0.01 * 0.5), rtol=1e-3, atol=0)


@pytest.mark.full("further")
@ranks(2)
def test_accumulation_as_the_plan_says() -> None:
    launch("--set", "accumulate=2")
    training = Training()
    assert training.optimizer.backward_passes_per_step == 2
    training.optimizer.zero_grad()
    for _ in range(2):
        training.model(torch.ones(1, WIDTH)).sum().backward()
    assert training.optimizer._exchange.reducer.exchanges_done == 1
    training.optimizer.step()
    with pytest.raises(ConfigError, match=r"accumulate = 2 \(.*plan.toml\).*backward_passes_per_step=3"):
        training.optimizer.set_backward_passes_per_step(3)


def refused(words: Sequence[str], match: str, kind: type[ConfigError] = ConfigError, **keywords: Any) -> None:
    """Expect an error of the constructor, on every rank."""
    launch(*words)
    with pytest.raises(kind, match=match):
        Training(**keywords)
    assert basics.is_initialized()
    leave()


def leave() -> None:
    """Leave a job whose plan had no effect."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hvd.shutdown()


class Halves(NoneCompressor):
    """Somebody's own compression."""


@pytest.mark.gate_cases("connections=2-keywords12-connections = 2 .* has no meaning")
@pytest.mark.parametrize(
    ("words", "keywords", "match"),
    [
        (
            "codec=int8",
            {"compression": hvd.Compression.fp16},
            r"codec = 'int8' \(.*plan.toml\).*=fp16",
        ),
        ("codec=int8", {"compression": Halves}, r"codec = 'int8' .* compression=Halves"),
        ("accumulate=4", {"backward_passes_per_step": 2}, r"accumulate = 4 .* backward_passes_per_step=2"),
        ("sync_batch_norm=true", {}, r"sync_batch_norm = true .*convert_sync_batchnorm"),
        ("zero=1", {}, r"zero = 1 with hvd\.Dist.*is given no model; in the script: farandole"),
        ("precision=bf16", {}, r'precision = "bf16" .* is given no model; in the script: torch.autocast'),
        ("recompute=blocks", {}, r'recompute = "blocks" .* is given no model; in the script: torch.utils.checkp'),
        ("frozen_codec=int8", {}, r'frozen_codec = "int8" .* is given no model; in the script: farandole'),
        ("offload=disk", {}, r'offload = "disk" .* is given no model; in the script: farandole'),
        ('train_schedule={"0": "*"}', {}, r"train_schedule = .* is given no model; in the script: farandole"),
        (
            "route=hierarchical",
            {"groups": 1},
            r"'hierarchical' .*because groups were asked for; drop route",
        ),
        ("nonfinite=skip", {"groups": 1}, r"nonfinite = 'skip' .* has no meaning"),
        ("connections=2", {"groups": 1}, r"connections = 2 .* has no meaning"),
        ("codec=int8", {"op": hvd.Adasum}, r"codec = 'int8' .* with op=Adasum no gradients travel"),
        ("clip_norm=1", {"op": hvd.Adasum}, r"clip_norm = 1.0 .* with op=Adasum no gradients travel"),
        ("sync=local:H=4", {}, r'sync = "local:H=4" .* is given no model; in the script: farandole'),
    ],
)
@ranks(2)
def test_what_script_and_plan_say_differently_or_in_vain(words: str, keywords: dict[str, Any], match: str) -> None:
    refused(["--set", words], match, **keywords)


@ranks(2)
def test_variables_and_plan_that_differ() -> None:
    os.environ["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "1"
    launch("--set", "route=flat")
    with pytest.raises(ConfigError, match=r"route = 'flat' .*HOROVOD_HIERARCHICAL_ALLREDUCE=1 asks for"):
        hvd.init()
    _forget()


@ranks(2)
def test_a_codec_that_no_parameter_can_have() -> None:
    launch("--set", "codec=int8")
    hvd.init()
    model = nn.Linear(2, 2)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    assert ("none of the 2 parameters can have it" in said.getvalue()) == (hvd.rank() == 0)
    leave()
    os.environ.pop("FARANDOLE_PLAN")
    hvd.init()  # a script's own compression of a small model is no mistake
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), compression=hvd.Compression.int8
    )
    assert optimizer._exchange.reducer.plan.codec == "none"


@ranks(2)
def test_a_plan_for_gradients_without_an_optimizer_is_said_to_have_no_effect() -> None:
    launch("--set", "codec=int8")
    hvd.init()
    hvd.allreduce(torch.ones(1))
    if hvd.rank() == 0:
        with pytest.warns(RuntimeWarning, match=r"the plan had no effect, .*: codec = 'int8'"):
            hvd.shutdown()
    else:
        hvd.shutdown()


@ranks(2)
def test_plans_that_differ_between_ranks() -> None:
    if os.environ["FARANDOLE_RANK"] == "1":
        launch("--set", "clip_norm=1")
    training = Training()
    with pytest.raises(hvd.HorovodMismatchError, match="plan key 'clip_norm' is"):
        training.step()
