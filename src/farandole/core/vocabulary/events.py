"""What a running job says about itself: small records, written by `comm` and `train`, read by `observe`.

[Note: what is recorded] Timestamps only, of this process's monotonic clock, taken where the code
passes anyway: never a barrier, never a device synchronisation. A recorder has one method and the
default does nothing, so that no code asks whether there is a listener. All times are seconds of
`time.monotonic()`, which is one clock for all processes of a host; `ClockOffset` relates the hosts' clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

EVENTS_VERSION = 2
"""Version of the records in ``events-rank*.jsonl``; readers refuse newer ones."""

DATA = "data"
FORWARD = "forward"
LOSS = "loss"
"""Between the end of the model's forward pass and the begin of its backward pass."""
BACKWARD = "backward"
EXCHANGE = "exchange"
"""Waiting for the exchange of gradients with nothing left to compute."""
OPTIMIZER = "optimizer"
COMPUTING = "computing"
"""Several of forward, backward and optimizer, where nothing tells when the next began."""
UNDIVIDED = "undivided"
"""Waiting for data and computing, where nothing tells them apart: in training loops of other frameworks."""
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
"""``torch.save`` in the thread that trains, and what a script names so."""
END_OF_EPOCH = "end of epoch"
"""What the callbacks of a Keras training do at the end of an epoch: checkpoints, metrics of all ranks."""
PIPELINE_WAIT = "pipeline wait"
"""Waiting for activations or gradients of another stage of a pipeline, with nothing to compute."""
GARBAGE_COLLECTION = "garbage collection"
OTHER = "other"
STEP_PHASES = (DATA, UNDIVIDED, FORWARD, LOSS, BACKWARD, COMPUTING, EXCHANGE, OPTIMIZER)
"""What every step of training is made of, in order; everything else is a pause, and the rest is `OTHER`."""


@dataclass(frozen=True, slots=True)
class DataWait:
    """The training loop asked its loader for a batch and got it."""

    begin_seconds: float
    end_seconds: float
    samples: int
    """Samples of this rank that count (0 for a placeholder batch)."""
    cpu_seconds: float | None = None
    """CPU time of the thread that waited: what it did for the batch itself. None: not known."""


@dataclass(frozen=True, slots=True)
class Phase:
    """This rank was busy with something of a name: one of those above, or the user's (`fd.phase`).

    Phases nest: a garbage collection happens inside a forward pass. The innermost one has the time.
    """

    name: str
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class PipelineAction:
    """A stage of a pipeline computed something of a micro-batch."""

    stage: int
    kind: str
    """F, B, I or W: see core/schedule."""
    micro_batch: int
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class InnerExchange:
    """This rank could compute nothing until an exchange was over that is none of gradients."""

    degree: str
    """"tensor", "context", "expert", "pipeline" of activations, "shard" of stepped parameters, "rows", "loss"."""
    begin_seconds: float
    end_seconds: float
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class DevicePhases:
    """The phases of a finished step as its accelerator ran them, on the host's clock. They come late."""

    step: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """One bucket's way through one exchange."""

    nbytes: int
    """Bytes of its gradients, uncompressed; 0 for a sparse one."""
    sent_bytes: int
    """Bytes this rank sent for it."""
    first_ready_seconds: float | None
    """When the first of its gradients was ready on this rank. None: it had none there."""
    last_ready_seconds: float | None
    launch_seconds: float
    """When it was handed to what carries it."""
    begin_seconds: float
    """When its turn came: the first message was given to the network."""
    end_seconds: float
    """When its sum was there."""
    wait_seconds: float = 0.0
    """Between begin and end: waiting for messages of other ranks. 0 where the carrier does not say."""
    codec_seconds: float = 0.0
    """Between begin and end: encoding, decoding and adding. 0 where the carrier does not say."""
    rounds: int = 1
    """Messages that had to be waited for one after the other."""


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """What is in a bucket and how it travels."""

    nbytes: int
    codec: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The buckets of the exchanges from now on, in launch order."""

    route: str
    buckets: tuple[BucketFacts, ...]
    engine: int = 0
    """Which engine's exchanges, where a process has several."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of gradients: what was launched while backward ran, and the wait after it."""

    launch_seconds: tuple[float, ...]
    """When each bucket was handed to the network, in launch order."""
    wait_begin_seconds: float
    """When this rank had nothing left to do but wait."""
    wait_end_seconds: float
    sent_bytes: int
    """Bytes this rank sends for it, by the formula of the route."""
    buckets: tuple[BucketTimes, ...] = ()
    """Each bucket's times, in launch order; empty when they were not measured."""
    engine: int = 0
    """Which engine's, where a process has several."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """The optimizer has stepped; everything since the previous one belongs to this step."""

    step: int
    """Counts from 1."""
    end_seconds: float


SKIPPED_STEPS = "skipped_steps"
LOSS_SCALE = "loss_scale"
"""Names of logged values, where the plan's precision skips steps whose gradients are not finite."""
CRITICAL_BATCH = "critical_batch"
"""Name of a logged value, where `fd.noise_scale` measures: B_simple, in samples."""


@dataclass(frozen=True, slots=True)
class Logged:
    """What the training loop told us with `fd.log`. Unknown things are None."""

    loss: float | None = None
    tokens: int | None = None
    total_steps: int | None = None
    metrics: Mapping[str, float] | None = None
    """Other values by name."""
    samples: int = 0
    batch_samples: int | None = None  # of this rank: beside those of batches that were waited for, or instead


@dataclass(frozen=True, slots=True)
class Sample:
    """What the host and this process did since the previous sample. None: cannot be known here."""

    at_seconds: float
    span_seconds: float
    """Time since the previous sample, over which rates and counts are taken."""
    process_cores: float | None = None
    """CPU time of this process (all threads) a second: 1.0 is one core."""
    machine_share: float | None = None
    """Share of the machine's CPU time that was used, by all processes, 0 to 1."""
    cores: int | None = None
    """Cores this process may run on."""
    resident_bytes: int | None = None
    available_bytes: int | None = None
    """Memory of the machine that could be had without swapping."""
    swapped_bytes: int | None = None
    """Moved to or from swap by the whole machine."""
    major_faults: int | None = None
    """Pages this process had to wait for the disk for."""
    preemptions: int | None = None
    """Times this process was ready to run and had to make room for another."""
    network_sent_bytes: int | None = None
    """By the whole machine, over all interfaces but loopback."""
    network_received_bytes: int | None = None
    gpu_share: float | None = None
    """Share of the time in which this rank's accelerator ran something, 0 to 1."""
    gpu_used_bytes: int | None = None
    gpu_total_bytes: int | None = None
    core_wait_share: float | None = None
    """Share of the time in which the main thread was ready to run and waited for a core, 0 to 1."""
    link_bits_per_second: float | None = None
    """Speed of the interface that sent most, as its driver tells it; of hardware alone, virtual ones have none."""
    peak_bytes: int | None = None
    """The most until now: allocated on this rank's accelerator, or resident where the CPU trains."""
    thread_cores: float | None = None
    """CPU time a second of the busiest other Python thread of this process: `SETUP_THREAD` says what it runs."""
    children_cores: float | None = None
    """CPU time a second of this process's children: the workers of its loader, as a rule."""


SetupValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Setup:
    """Facts about this rank's training that a fix depends on. A later event replaces values of the same name."""

    values: Mapping[str, SetupValue]
    """By a name of those below."""


SETUP_THREADS = "threads"
"""Threads of torch's CPU operations."""
SETUP_CORES = "cores"
"""Cores this rank may run on."""
SETUP_THREAD = "busy_thread"
"""What another Python thread of the process runs that computes much, such as "work at train.py:4"."""
SETUP_CORE_LIST = "core_list"
"""Which they are: ``0-3,8``."""
SETUP_WORKER_CORES = "worker_cores"
"""Cores the workers of its data loader may run on."""
SETUP_DEVICE = "device"
"""Type of the device that trains: ``cpu`` or ``cuda``."""
SETUP_WORKERS, SETUP_PREFETCH = "loader_workers", "loader_prefetch"  # batches `fd.prefetch` draws ahead; or None
SETUP_PERSISTENT = "loader_persistent"
"""Whether the loader's workers outlive an iteration."""
SETUP_BATCH = "loader_batch"
"""Samples of a batch, as the loader was asked."""
SETUP_PLAN = "script_plan"  # keys that the script's own plan sets, as JSON; not said where the command gave a plan
SETUP_OPTIMIZER = "optimizer"  # its class
SETUP_FUSED, SETUP_FOREACH = "optimizer_fused", "optimizer_foreach"
SETUP_MOMENTUM = "optimizer_momentum"  # whether SGD or RMSprop keep one
SETUP_TENSORS, SETUP_ELEMENTS, SETUP_CODABLE = "parameter_tensors", "parameter_elements", "codable_share"
"""What the optimizer has: its parameters, their numbers, and the share of those that train that a codec takes."""
SETUP_FROZEN = "gc_frozen"
"""Whether ``gc.freeze`` was called, or the garbage collector is off."""
SETUP_FRONT_END = "front_end"
"""Whose loop trains, where it is not one of torch: one of `FRONT_ENDS`."""
SETUP_LOOP = "loop"  # whose loop of torch trains, where it is not the script's own; one of these:
LOOPS = TRAINER, LIGHTNING = "transformers", "lightning"
FRONT_ENDS = ("tensorflow", "keras on tensorflow", "keras on torch")
SETUP_WRAPPER = "wrapper"  # torch's class that exchanges the gradients, where our engine does not; of these:
WRAPPERS = DDP, FSDP1, FSDP2 = "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"
SETUP_ZERO = "zero"
"""ZeRO stage of a model whose exchanges are those of sharded parameters; not said of others."""
SETUP_SHARD_WITHIN, SETUP_CODEC, SETUP_WEIGHT_CODEC = "shard_within", "codec", "weight_codec"
"""What its plan has under these keys."""
SETUP_CHECKPOINT_ALARM = "checkpoint_alarm"
"""Why the last checkpoint was not saved; empty after one that was."""
SETUP_CHECKPOINT_ASYNCHRONOUS = "checkpoint_asynchronous"
"""Whether checkpoints are written while training goes on, of one that `fd.save` or `fd.Checkpointer` made."""
SETUP_CHECKPOINT_OBJECTS = "checkpoint_objects"
"""What they were called with, as Python: ``"checkpoints", model, optimizer, loader=loader``."""
SETUP_EXPERT_LAYER = "expert_layer"
"""Name of the mixture-of-experts layer with the most unequal load."""
SETUP_EXPERTS = "experts"
"""Number of experts of that layer."""
SETUP_EXPERT_BUSIEST = "expert_busiest"
"""Number of its expert that most tokens choose."""
SETUP_EXPERT_IMBALANCE = "expert_imbalance"
"""How many times the mean of its experts that one gets."""
SETUP_EXPERT_DROPPED = "expert_dropped"
"""Share of its tokens' choices that were over the capacity, 0 to 1."""
SETUP_EXPERT_SECONDS = "expert_seconds"
"""What this rank's experts of all layers take in a step, in seconds; 0 where it is not known."""
SETUP_CRITICAL_BATCH = "critical_batch"
"""What `fd.noise_scale` has measured until now: B_simple, in samples; and where it is likely to be."""
SETUP_CRITICAL_LOW, SETUP_CRITICAL_HIGH = "critical_batch_low", "critical_batch_high"
"""None: the true gradient cannot be told from 0."""
SETUP_PIPELINE = "pipeline"
"""The pipeline of a rank: schedule, ranks, micro-batches and stages a rank, with spaces: ``1f1b 4 8 1``."""
SETUP_PIPELINE_RANK, SETUP_PIPELINE_CUTS = "pipeline_rank", "pipeline_cuts"
"""The first module of each stage but the first, with spaces."""
SETUP_REPLICAS, SETUP_DEGREES = "replicas", "degrees"
"""Ranks with the same parameters (of one, no gradients are exchanged); sizes of the mesh in `degrees.ORDER`."""
SETUP_SAME_SAMPLES = "same_samples"
"""Which of the ranks this is that train on the same samples, and how many they are: ``0 2``."""
SETUP_PREDICTED, SETUP_ROWS_IN_STEP = "predicted", "rows_in_step"
"""What the plan that was applied says of a step, as JSON; that a table of rows has ``staleness=0``."""
SETUP_OTHER_BYTES = "other_bytes"
"""Memory of the process when it was applied that is not the model's and its optimizers'. None: not known."""
SETUP_PEAK_BEFORE = "peak_before_bytes"
"""The most that the process had held until then."""
SETUP_SHARES = "sample_shares"
"""Samples of a batch on each rank, with spaces, where the plan balances them: ``18 18 18 10``."""
SETUP_SYNC, SETUP_MEETINGS, SETUP_APART = "sync", "meetings", "meetings_apart"
"""The plan's `sync`, meetings until now, and how far this rank was from the ranks' mean at them: mean, 0 to 1."""
SETUP_TUNING = "tuning"
"""What `farandole tune` does from this step on, in words; empty when it is done."""
SETUP_ARGUMENTS = "arguments"
"""The script and its arguments, as a command line."""


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """What this process sent over its TCP connections to one address of another host."""

    own_address: str
    peer_address: str
    sent_bytes: int
    """Bytes that the other host's kernel has acknowledged."""
    busy_seconds: float
    """In which something was on its way, all connections together. Not: waiting for the other process to read."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the kernel counted of this process's connections to other hosts since the previous such event."""

    at_seconds: float
    span_seconds: float
    """Time since the previous one."""
    links: tuple[LinkTraffic, ...]


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """This host's clock beside rank 0's: its time + `offset_seconds` was rank 0's time, within `error_seconds`."""

    at_seconds: float
    """When, on this host's clock."""
    offset_seconds: float
    error_seconds: float
    """Half the shortest round trip: the offset cannot be wrong by more, however unequal the two ways were."""


@dataclass(frozen=True, slots=True)
class Started:
    """The first event: who we are. Training time counts from here."""

    rank: int
    size: int
    host: str
    process_id: int
    generation: int
    begin_seconds: float
    wall_time: str
    """ISO 8601, for people; no computation uses it."""
    clock: str = ""
    """Names the clock that times are of: processes with the same name share one. Empty: not known."""


Event = (
    Started
    | DataWait
    | Phase
    | PipelineAction
    | InnerExchange
    | DevicePhases
    | BucketLayout
    | Exchange
    | StepDone
    | Logged
    | Sample
    | Setup
    | Traffic
    | ClockOffset
)


class Recorder(Protocol):
    """Takes events. Must be cheap, must not raise, must not block on anything but its own file."""

    def record(self, event: Event) -> None:
        """Take one event."""


class NullRecorder:
    """The default: takes everything, keeps nothing."""

    def record(self, event: Event) -> None:
        """Forget the event."""
