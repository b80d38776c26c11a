"""The layout of `src/farandole`: packages with their ranks, folders with their levels, and what is still to come.

This is the one table. `tests/style/test_layers.py` tests the imports against it, docs/contribute.md shows it
(``python -m tests.style`` writes it there), and a test compares the two.
"""

from __future__ import annotations

PACKAGES = {
    "core": (0, "shared types, errors and settings; standard library only"),
    "comm": (1, "exchange tensors"),
    "plan": (1, "describe a run and predict its step"),
    "checkpoint": (1, "checkpoints on disk: their format, verification and the writer process"),
    "observe": (1, "record and analyse runs"),
    "launch": (1, "start processes"),
    "sync": (2, "when replicas synchronise"),
    "parallel": (2, "how one model is distributed"),
    "train": (3, "helpers of the training loop, each usable alone"),
    "horovod": (4, "compatibility front ends"),
    "integrations": (4, "front ends for transformers, Lightning, Accelerate and notebooks"),
    "keras": (4, "helpers of Keras trainings, each usable alone"),
    "bench": (5, "benchmarks"),
    "cli": (6, "parse arguments, call one function, print; no logic"),
}
"""Package -> its rank and purpose. A package imports packages of lower rank only."""

WITHOUT_TORCH = ("core", "plan", "checkpoint", "observe", "launch")
"""Packages that import no torch, so that commands start in milliseconds."""

FOLDERS: dict[str, list[tuple[str, str]]] = {
    "core": [
        ("vocabulary", "shared types: plans, codecs by name, events, errors, units, file names"),
        (".", "what all agree on, by the standard library alone: environment, launchers, the job's plan, "
              "clusters, links, what a step takes, schedules of pipelines, frames, failures"),
        ("host", "facts from the kernel about this host: interfaces, sockets, stacks, paths"),
    ],
    "comm": [
        ("native", "kernels in C for the CPU, compiled where they run; everything works without them"),
        ("device", "streams, copies and kernels of an accelerator; everything works without the kernels"),
        ("messages", "messages of codecs, all-reduce algorithms on top, and a simulator of all ranks"),
        ("batch_weight", "the weight of this rank's batch in the mean over samples"),
        ("world", "the world of ranks: rendezvous, groups, the store, and how blocked calls are aborted"),
        ("collectives", "collectives of the backend: the sum of a bucket, broadcast"),
        ("transport", "bytes between hosts: connections, messages, and the thread that drives them"),
        ("codecs", "codecs: compress gradients, exchange them, return their mean over the ranks"),
        ("routes", "the route of a bucket: flat, hierarchical, shared memory or messages"),
        (
            "autotune",
            "``codec = \"auto\"``: measure the link, the codecs and the backward pass; predict, choose, "
            "measure again",
        ),
        ("engine", "gradients of a backward pass: who owns them, buckets, rows, hooks, what is in flight"),
        ("backend", 'a `torch.distributed` process group: `init_process_group("farandole")`'),
    ],
    "plan": [
        (".", "the profile of a model, the memory of a rank by category, and the planner's shared types"),
        ("cost", "what a step of a plan takes, holds and sends, from a profile and a cluster"),
        ("refit", "figures of a cluster corrected by what runs took"),
        ("search", "which plans there are for a model and a cluster, and which is best"),
        ("scaling", "a plan on more ranks: the cost model over sizes, failures, goodput, how often to save"),
        ("batch_advice", "the batch at which communication hides, and what the critical batch says about it"),
        ("answer", "what the planner says, as text, JSON and the plan file"),
        ("answer_page", "the same as a page"),
        ("scaling_page", "a plan on more ranks, as text and as a page"),
    ],
    "checkpoint": [
        (".", "the format: files, manifest, directory, lock; reading and verifying it; the process that writes"),
    ],
    "observe": [
        ("records", "the records of a run: written while it trains, kept short on disk, read again on one clock"),
        ("figures", "the figures of a run: one definition of a step's parts, of waits and of the closing summary"),
        ("diagnose", "where a run's time goes, one file a cause; `diagnose` a run directory, `compare` two"),
        (
            "export",
            "a run in the formats of other tools: one file per format; the timeline of operations",
        ),
        (
            "report",
            "the HTML report of a run: one file, no references to anything outside it, from the run "
            "directory alone",
        ),
    ],
    "launch": [
        ("output", "output of ranks: console prefixes, log files, progress"),
        ("job", "the job and its ranks: the rank specification, hosts, placement, the run directory"),
        ("supervise", "the processes of one host: starting, watching, stopping, and naming the root cause"),
        ("doctor/facts", "facts about hosts and links as plain values; memory, cores and GPUs of this host"),
        ("doctor/this_host", "what this host says of itself"),
        ("doctor/checks", "every check as a pure function: facts in, findings out; no facts make one raise"),
        ("namespaces", "hosts on one machine: namespaces, shaped links between them, and a command on them"),
        ("elastic", "jobs whose number of ranks changes while they run: the launcher's side"),
        ("ssh", "ranks on other hosts, over the system's ssh: one connection per host carries everything"),
        ("doctor", "``farandole doctor``: hosts asked for facts, links measured, and the commands that fix them"),
        ("schedulers", "submitting a job to Slurm, MPI, Kubernetes or Ray"),
        ("function_job", "one Python function as a job: for notebooks and `horovod.run`"),
        ("start", "from a job request to a started job: here, over ssh, elastic, or on Ray"),
    ],
    "sync": [
        (".", "when replicas agree: local SGD and DiLoCo, whole and in fragments, by comm's codec sessions"),
        ("server", "processes that hold state for all ranks: requests applied once, snapshots"),
        ("server/dense", "parameters and states at servers: their cut, clocks of ranks, the policy"),
        ("rows", "tables of rows by id at servers: shards, optimizers of rows, pulls and pushes, copies"),
    ],
    "parallel": [
        ("model", "the owner of all that belongs to one distributed model, and the strategies that make it; names "
         "types of files below, as fields"),
        ("blocks", "the repeated blocks of a model: one definition for all who ask"),
        ("changed_class", "modules whose class is changed in place"),
        ("mesh", "groups and parts of the world by the degrees of a plan"),
        ("split", "parameters that are split over ranks: which pieces of the whole a rank has"),
        ("seeds", "random numbers of a divided model: equal where ranks compute the same"),
        ("global_norm", "the norm of gradients over all ranks, where a rank has a part of the model"),
        ("data", "data parallelism beyond gradients: BatchNorm, buffers, and models compared between ranks"),
        ("loss_scaling", "the scale of gradients of passes in float16, inside the graph and by the steps"),
        ("lower_precision", "forward passes in lower precision"),
        ("recompute", "activations that are computed again in backward instead of kept"),
        ("frozen_weight", "a weight that does not train, in few bits"),
        ("frozen_model", "the frozen weights of a model, and adapters that train beside them"),
        ("optim", "the optimizer's step under data parallelism"),
        ("instrument", "hooks that only record: phases of a step, accelerator events, the buckets of DDP"),
        ("zero", "states, gradients and parameters in shards: stages 1 and 2, and 3 by FSDP2"),
        ("tensor", "layers split over ranks: cut by a recipe, and proven against the plain module"),
        ("pipeline", "a model cut into stages, and its step by the actions of a schedule"),
        ("expert", "mixture of experts: routing and all-to-all"),
        ("context", "sequences split over ranks"),
        (".", "`fd.distribute`: the strategies in their order; and the exchange state"),
    ],
    "train": [
        ("balance", "batches in proportion to the speed of a rank"),
        ("same_data", "ranks that read the same data, or other data than they should"),
        ("data", "sharding a data loader over the ranks"),
        ("prefetch", "`fd.prefetch`: batches of any loader, drawn and copied ahead of the loop"),
        ("noise_scale", "the gradient noise scale: averages of squares of gradients, and the critical batch"),
        ("gather", "values of all ranks brought together"),
        ("elastic", "a worker of an elastic job: its control connection, and the change of generations"),
        ("chunked_cross_entropy", "a last layer and its loss that keep less memory than the plain ones"),
        (
            "verify",
            "checks of a distributed training: equal parameters, sharded data, gradients against one process",
        ),
        ("analysis", "any model as the planner sees it: passes, memory, seconds; plans and micro-batches tried"),
        (".", "`fd.init`, records, progress, phases, the tuner, preemption: one file each"),
        ("checkpoint", "safetensors, a manifest with hashes, one rename; any plan loads into any other"),
    ],
    "bench": [
        (".", "what is measured and with what: commands, their ranks, data sets and plain models, intervals"),
        ("cluster", "``farandole measure``: what devices, links, codecs and disks give, into `cluster.toml`"),
    ],
    "horovod": [
        ("data", "loading data while the model computes; imports no torch"),
        ("as_horovod", "the import hook of `--as-horovod`"),
        ("mxnet", "says that there is no front end for MXNet, when it is imported"),
        ("named_ops", "operations that ranks submit in any order, matched by name"),
        ("common", "shared by all front ends: the world, process sets, errors, small helpers"),
        (
            "exchange",
            "for front ends whose tensors are not torch's: arrays, flat buckets, layouts compared once, records "
            "of steps",
        ),
        ("array_verification", "what ``farandole verify`` looks at in trainings that are not torch's"),
        (
            "runner",
            "starting jobs by Horovod's names: `run` for a function, ``python -m farandole.horovod.runner`` "
            "for a command",
        ),
        (".", "the version of Horovod whose names these are, and `run`"),
        ("torch/compression", "Horovod's compressors, and the codecs of the reducer"),
        ("torch/ops", "Horovod's tensor operations for PyTorch"),
        ("torch/functions", "parameters, optimizer state and objects from one rank to all"),
        ("torch/optim", "inside `DistributedOptimizer`: the paths of gradients, names, Adasum, join"),
        ("torch/mpi_ops", "all operations under Horovod's module name"),
        ("torch/sync_batch_norm", "`SyncBatchNorm`"),
        ("torch/optimizer", "`DistributedOptimizer`"),
        ("torch/elastic", "`hvd.elastic` for PyTorch"),
        ("torch", "Horovod's names for PyTorch"),
        ("tensorflow/installed", "TensorFlow itself: a missing one, or one too old, is one clear error"),
        ("tensorflow/errors", "errors that are Horovod's and TensorFlow's"),
        ("tensorflow/compression", "Horovod's compressors for TensorFlow's tensors"),
        ("tensorflow/ops", "Horovod's operations for TensorFlow: at once, or in a graph by a kernel in C++"),
        ("tensorflow/functions", "variables and objects from one rank to all"),
        ("tensorflow/util", "small helpers under the names that programs import"),
        ("tensorflow/gradients", "gradients in flat buckets, exchanged in place"),
        ("keras/variables", "what differs between Keras 3 and tf_keras: variables and optimizers"),
        ("keras/layer", "optimizer, callbacks, loading and watched `fit` for Keras 3, on TensorFlow and on torch"),
        ("keras/sync_batch_norm", "`SyncBatchNormalization` for Keras 3, on TensorFlow and on torch"),
        ("tensorflow", "Horovod's names for TensorFlow"),
        ("keras", "Horovod's names for Keras 3, whatever its backend is"),
        ("tensorflow/keras", "Horovod's names for `tf.keras`"),
        ("shim", "A folder for PYTHONPATH, not a package to import: see `farandole.horovod.as_horovod`"),
    ],
    "integrations": [
        (".", "one module for each package: transformers, Lightning, Accelerate; and `fd.notebook`"),
    ],
    "keras": [
        (".", "`shard` for `tf.data.Dataset` and `keras.utils.PyDataset`; imports Keras and TensorFlow when used"),
    ],
    "cli": [
        (".", "the entry point: finds the command"),
        ("options", "command-line options that several commands share, and the flags of horovodrun"),
        ("commands", "one file for each command: parse, call one function, print"),
    ],
}  # fmt: skip
"""Package -> its folders from low to high: a folder imports only those before it. ``.``: the package's own files.

A path may have several parts (``torch/elastic``) and may name one file (``report/page``, ``torch/__init__``),
which is then a level of its own. A module belongs to the longest path that fits: a folder's folders need no rows.
A package's ``__init__`` without a row is below all of them: it imports nothing of its package.
"""

TO_COME: set[str] = set()
"""Rows of the tables above that hold a place: nothing is there yet."""

LIMITS = {"attributes": 15, "keys": 60, "lines": 700}
"""The most attributes of a class, keys of a record of a file, and lines of a file."""

OWNERS = ("parallel/model",)
"""Files that name, under TYPE_CHECKING, the types of what they hold: these may lie above them."""

THIN_LINES, SMALL_FOLDER = 80, 4
"""A shorter file with one importer belongs to it; a folder of fewer files is none. See `tests.style.ceilings`."""

FILE_RECORDS = {
    "core/vocabulary/spec:Plan": "plan.toml",
    "plan/profile:ModelUnit": "the units in model.json",
    "plan/profile:ModelProfile": "model.json",
    "plan/search/result:PlanAnswer": "plan.why.json",
    "core/vocabulary/events:Sample": "the samples in events-rank*.jsonl",
}
"""Frozen records whose fields are the keys of a file that users read, and that file.

Their fields are as flat as the file: grouping them would change the format, or add a second form of the same.
"""

FRONT_DOOR = ("__init__", "__main__", "backend", "version")
"""Files of the root, which every package may import: lazy names (PEP 562), the backend's name, the version."""

ENVIRONMENT_FILE = "core/env"
"""The one module that reads environment variables."""
