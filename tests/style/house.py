"""The layout of `src/farandole`: packages with their ranks, folders with their levels, and what is still to come.

This is the one table. `tests/style/test_layers.py` tests the imports against it, CONTRIBUTING shows it
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
    "bench": (4, "benchmarks"),
    "horovod": (4, "compatibility front ends"),
    "integrations": (4, "front ends for transformers, Lightning, Accelerate and notebooks"),
    "keras": (4, "helpers of Keras trainings, each usable alone"),
    "cli": (5, "parse arguments, call one function, print; no logic"),
}
"""Package -> its rank and purpose. A package imports packages of lower rank only."""

CODE_LINES = 97_374
"""Ceiling of the product's code lines. A change lowers it, or raises it with what the new lines give, below.

83,170: what is there, without `farandole init`, the suite of `bench`, names of Horovod that nothing uses and
sessions of TensorFlow 1. TensorBoard and Prometheus write their own formats, the doctor takes its own probe at its
word, and gradients of TensorFlow, torch and JAX go one way. Since then: 75 for steps by what a GPU ran, and
for two ranks on one; 55 for what codecs lost of parts of a model, and for verifying such models; 30 to refuse
a tied weight that would be split in two ways, and optimizers of ZeRO before anything changes; 80 so that divisions
are refused before anything is sent, experts and shards step together, and residuals follow a route or a mesh; 190
for verdicts: buckets that share a wire, fewer exchanges as a loop can make them, a thread that holds the GIL,
workers that sleep on a busy machine; 20 so that no plan is proposed that an accelerator cannot run;
340 for a word where silence misled: jobs without records, checks that were not made, two ranks that save one file,
a Horovod optimizer that is verified, losses of an evaluation, the newest run, how this copy is installed;
230 for what a model takes by degree before it runs, and plans in tables;
96 so that what is said after trials is of the plan that won, and what a planner would ignore is refused; presets;
212 for targets that do not count and losses of routers in `fd.step`, and evaluations of any size; 90 for which
exchange of a step tells of the link, what a held lock and a crowd cost, and fixes in a Trainer's words; 180 so
that a stock DistributedDataParallel script is recorded unasked; 150 for Trainers that make whole batches, and for
states of a whole model that a divided one refuses; 100 for the simplest of near plans, for blocks that are alike
but for what counts them, and for large schedules that are validated faster; 570 for codecs of gradients on an
accelerator: streams, a conductor without a thread, and buckets that ask for no number; 560 for pipelines without a
flush between batches; 590 for shares of a batch by speed: whole samples, places where they change, when they do,
what they would gain, and what they do not go with; 100 for a measurement that takes the time it is given; 240 for
a number of micro-batches that is tuned, and for seeing what it would change; 1,180 for ranks that train on their
own between meetings: the outer step, meetings over the whole model or parts of it, checkpoints, refusals, their
diagnosis, and a measured choice between them and codecs in each step; 590 for batches that a thread draws and
copies ahead of the step, for what waits until the loop has them, and for workers by what is measured; 380 for
kernels of codecs on a GPU, their trial at first use, and floats of 8 bits; 960 for a device that is compared with
the CPU before it trains: codecs, buckets in lock step, streams, the engine; 40 for one seam to accelerators;
200 for named operations on a device by groups of its backend; 20 for the memory of a device without NVML;
190 for codec auto on a device; 70 for a check of its named operations; 2,080 for servers that hold parameters:
processes and their protocol, requests applied once, snapshots, bounded staleness;
1,045 for tables of rows by id at servers: index, shards, optimizers of rows, rounds of pushes, snapshots, copies;
50 for servers that keep states when parameters are loaded or changed, and that do not die of one request for ever;
50 so that an optimizer that was made later steps with all ranks or not at all;
10 so that servers say errors again and have them in snapshots, and a journal goes on behind half a line;
45 so that pipelines do not stand still by NCCL, and one GPU is tested with two ranks; 11 so that a plan that is
made in Python is checked as one of a file is; 15 for a size of buckets that suits accelerators;
84 for rows in checkpoints, steps without ids that wait, and ids of other kinds; 108 so that codecs on GPUs send a
shard of each bucket to other hosts; 34 for codecs of local steps with a model on a GPU;
19 so that a bucket on a device is told in as many operations for many gradients; 6 for an optimizer that is gone;
58 for tables by name in checkpoints, rows that do not age between, and sizes of buckets as they are;
215 so that codecs on GPUs go through CPU memory where the backend carries no messages, or slower ones;
37 for named operations by codecs there, and codec auto by slices; 28
for full devices; 64 so that a staged message waits neither for a rank that is gone nor in the way of others;
62 for codecs of accelerators that are measured, and planned with;
359 so that partial gradients of tensor parallel are found in the graph and summed where they enter, proofs run on
drawn values, routers count the tokens of all tensor ranks, several models have one norm, and shards stand beside
divided tokens; 88 went: a second region of seeds, a text form of schedules, formulas that tests alone used;
28 so that what a zero-bubble schedule computes in parts counts as one pass; 4 so that two checks of a first pass
do not take each other for a use of weights; 1 for frozen weights in a pipeline that measures its layers; 10 so
that gradients of a penalty on single rows are shards; 23 so that a pipeline sees attributes that change.
400 for preempted jobs that save, samples that end, refusals that all ranks raise, and gradients that a penalty
gives to shards; 310 for servers whose disk is full, ranks that others need, servers that end with their job, and
hostile manifests; 1,015 went: a second simulator of sizes and its roles, FSDP2 over segments, and what had no
caller. 153 for GPT-2's linear layers in few bits and with adapters, sequences in a list as blocks, and what a
process has before its model; 215 for trainers of other packages that save whole models of sharded ones; 235 for
fixes in the words of torch's wrappers, ranks at work that were called hanging, meetings, busy machines, and wrong
lines; 164 for divided models, whose samples count once and whose exchanges are communication. 138 for memory that
goes back under a limit and what makes a model lighter; 139 for FSDP2 scripts that are recorded unasked; 115 for
fixes that are taken as pasted, and waits within a group; 164 for spawned workers, ranks that do not come, secrets,
handlers of signals and terminals; 376 went: switches, segmented collectives of `bench`, and a second timeline.
231 for fixes that a script with its own plan or a loop of Lightning takes, batches drawn ahead, bytes of stepped
parameters, what a codec can carry, and jobs of schedulers that are checked before they wait. 200 for
what is said of trainings unlike one process, runs compared by samples and loss, corrections by runs that are a
test, and batches of inputs and targets. 117 for one account of activations: what grows with the batch and what
does not, by moments of a pass, in blocks, by names and on a part of a model. 214 for a search that goes by
memory where fast plans do not fit, and around the best ones, and what it says of precision, tokens and units.
239 for bf16 at stage 3 without a 16-bit copy of the model: weights that are gathered in 2 bytes and read in 4, and
casts that micro-batches share and recomputed blocks drop. 210 for tokens that are divided
in plans where a model lets them, gathered again and not kept, draws that all ranks need alike and have not, and
plans that are refined once and not for each of their buckets. 224 for models as GPUs run them where there is
none (110), experts of libraries in fakes, in time and in what is gathered (55), and settings that fail. 250 for
presets with figures of their own device (90), attention and the host in a pass, meshes and rings of links, copies
of shards (100), and what attention computes, counted and measured (60). 114 for plans by the user's recipe and for
what ranks that divide layers compute alike (70), for scripts that stay, for models that need values, and for
memory that is asked of fast layouts alone.
"""

WITHOUT_TORCH = ("core", "plan", "checkpoint", "observe", "launch")
"""Packages that import no torch, so that commands start in milliseconds."""

FOLDERS: dict[str, list[tuple[str, str]]] = {
    "core": [
        ("vocabulary", "shared types: plans, codecs by name, events, errors, units, file names"),
        ("wire", "framing of byte streams: where a frame ends, its bound, and its signature"),
        ("failures", "what failures mean: error texts of backends, and where ranks stand that wait"),
        ("schedule", "pipeline schedules: lists of actions, validated, simulated and drawn; pure arithmetic"),
        ("step_model", "how long a step takes: buckets, codecs and a link in, seconds out; pure arithmetic"),
        ("cluster", "what a cluster's devices, links, codecs and disks give, as figures with sources; its file"),
        ("environ", "the environment of this process: the one file that reads it, and settings from it"),
        ("launchers", "the variables of each launcher: one file per launcher; the first that matches is used"),
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
        ("host_memory", "all-reduce inside one host, through memory that its ranks share"),
        ("codecs", "codecs: compress gradients, exchange them, return their mean over the ranks"),
        ("routes", "the route of a bucket: flat, hierarchical, shared memory or messages"),
        ("sessions", "exchanges of encoded tensors without autograd hooks, and what codecs keep for them"),
        (
            "gradients",
            "the gradients of one rank: who owns `parameter.grad`, and what is accumulated until a later "
            "pass",
        ),
        (
            "autotune",
            "``codec = \"auto\"``: measure the link, the codecs and the backward pass; predict, choose, "
            "measure again",
        ),
        ("rows", "rows of tensors between their owners and all ranks"),
        ("buckets", "parameters that are exchanged together: their plan, memory and codecs"),
        ("reducer", "gradients of a backward pass: hooks, passes, and buckets in flight"),
        ("named_ops/channel", "control connections between ranks"),
        ("named_ops/operations", "one named operation: request, signature, cache entry, handle"),
        ("named_ops/data", "exchanging the tensors of named operations"),
        (
            "named_ops/matching",
            "which operations all members have submitted, whether they agree, and in which order they run",
        ),
        ("named_ops/control", "the controller of named operations: its thread, shutdown, stalls, joins"),
        ("named_ops", "operations that ranks submit in any order, matched by name"),
        ("backend", 'a `torch.distributed` process group: `init_process_group("farandole")`'),
    ],
    "plan": [
        (".", "the memory of a rank by category, what would make a model fit, and the planner's shared types"),
        ("model", "the profile of a model: its units, what they compute, keep and send"),
        ("cost", "what a step of a plan takes, holds and sends, from a profile and a cluster"),
        ("held", "figures of a cluster corrected by what runs took"),
        ("scale", "a plan on more ranks: the cost model over sizes, failures, goodput, how often to save"),
        ("search", "which plans there are for a model and a cluster, and which is best"),
        ("batch_size", "the batch at which communication hides, and what the critical batch says about it"),
        ("answer", "what the planner says: text, JSON, the plan file, and the page"),
    ],
    "checkpoint": [
        (".", "the format: files, manifest, directory, lock; reading and verifying it"),
        ("writer", "the process that writes a rank's files from memory they share"),
    ],
    "observe": [
        ("format", "the records on disk: rows, their short form, and which of them a long run keeps"),
        ("read", "reading the records of a run: one rank's timeline, one clock for all, how the run ended"),
        ("figures", "the figures of a run: one definition of a step's parts, of waits and of the closing summary"),
        ("diagnose/facts", "input and output of finders: the table of steps, evidence and findings"),
        ("diagnose/finders", "one file for each cause that a diagnosis can name, and their disjoint costs"),
        ("diagnose", "where a run's time goes, and how to improve it: `diagnose` a run directory, `compare` two"),
        ("live", "a run while it goes on: what each rank does now, from the ends of its files"),
        (
            "export",
            "a run in the formats of other tools: one file per format; the timeline of operations",
        ),
        ("record", "recording while a run trains: events to rows, host samples, traffic, progress"),
        (
            "report/content",
            "input of the sections: the run that was read, blocks of a page, formatting of quantities",
        ),
        (
            "report/charts",
            "charts as inline SVG in a frame of HTML labels: text keeps its size on a phone, shapes stretch "
            "to the width",
        ),
        (
            "report/sections",
            "the sections of the page, one per file: a `Run` goes in, a `Section` or None comes out",
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
        ("doctor/facts", "facts about hosts and links as plain values, and what a finding is"),
        ("doctor/checks", "every check as a pure function: facts in, findings out; no facts make one raise"),
        (
            "emulate",
            "hosts on one machine: namespaces, shaped links between them, and a command that runs on them",
        ),
        ("ssh/link", "the pipe between the launcher and one host: frames, handshake, heartbeat, and how it ends"),
        ("doctor/probe", "probes that collect facts on hosts and measure the links between them"),
        ("doctor", "``farandole doctor``: problems of hosts and links, and the commands that fix them"),
        ("elastic", "jobs whose number of ranks changes while they run: the launcher's side"),
        ("schedulers", "submitting a job to Slurm, MPI, Kubernetes or Ray"),
        ("ssh/agent", "the supervisor of one remote host, started over ssh"),
        ("ssh", "ranks on other hosts, over the system's ssh: one connection per host carries everything"),
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
        ("blocks", "the repeated blocks of a model: one definition for all who ask"),
        ("changed_class", "modules whose class is changed in place, and whose copies are of the plain class"),
        ("mesh", "groups and parts of the world by the degrees of a plan, and what cannot be combined"),
        ("split", "parameters that are split over ranks: which pieces of the whole a rank has"),
        ("outer_pass", "what surrounds the forward pass of a model's own code, for what runs it in pieces"),
        ("seeds", "random numbers of a divided model: equal where ranks compute the same"),
        ("global_norm", "the norm of gradients over all ranks, where a rank has a part of the model"),
        ("data", "data parallelism beyond gradients: BatchNorm, buffers, and models compared between ranks"),
        ("precision", "forward passes in lower precision, and the scale of their gradients"),
        ("recompute", "activations that are computed again in backward instead of kept"),
        ("frozen", "frozen weights in few bits, and adapters that train beside them"),
        ("optim", "the optimizer's step under data parallelism"),
        ("instrument", "hooks that only record: phases of a step, accelerator events, the buckets of DDP"),
        ("zero/fsdp", "stage 3: parameters in shards, by FSDP2 with our exchanges"),
        ("zero", "stages 1 and 2: sharded optimizer states and gradients"),
        ("tensor/layers", "layers of which each rank has a part, and the collectives around split regions"),
        ("tensor/recipe", "what becomes of each layer: by names, classes and traces; and what cannot be split"),
        ("tensor", "layers split over ranks: cut by a recipe, and proven against the plain module"),
        ("pipeline/versions", "two batches at once: the weights of each, and a loss that is on its way"),
        ("pipeline", "a model cut into stages, and its step by the actions of a schedule"),
        ("expert", "mixture of experts: routing and all-to-all"),
        ("context", "sequences split over ranks"),
        ("refuse_optimizers", "what a plan and an optimizer cannot do together"),
        ("divide", "dividing a model by all degrees of its plan, in one order"),
        (".", "`fd.distribute` and the exchange state: the package's own files"),
    ],
    "train": [
        ("balance", "batches in proportion to the speed of a rank"),
        ("data/ahead", "a thread that draws ahead of a loop, and what waits until the loop has a batch"),
        ("guards", "mistakes that a comparison of the ranks shows: warnings, and other data, which are refused"),
        ("data", "sharding a data loader over the ranks"),
        ("prefetch", "`fd.prefetch`: batches of any loader, drawn and copied ahead of the loop"),
        ("noise", "the gradient noise scale: averages of squares of gradients, and the critical batch"),
        ("metrics", "values of all ranks brought together, and values written live to other tools"),
        ("elastic", "a worker of an elastic job: its control connection, and the change of generations"),
        ("stall", "ranks that do no steps: a thread that notices it, and says which rank is where"),
        ("fused", "compositions of layer and loss that keep less memory than the plain ones"),
        (
            "verify",
            "checks of a distributed training: equal parameters, sharded data, gradients against one process",
        ),
        ("memory", "the memory of a training: from fake tensors, and by trials of micro-batches"),
        ("analysis", "the profile of a model: its units from fake tensors, their seconds by measurement"),
        ("trials", "the best plans run for some steps, each in its own processes"),
        ("tune", "settings that change while a training runs: candidates, blocks of steps, and the decision"),
        ("planning", "`fd.find_plan`: a model analysed, plans searched, the best ones tried"),
        (".", "`fd.init`, records, progress, phases, preemption: one file each"),
        ("checkpoint", "safetensors, a manifest with hashes, one rename; any plan loads into any other"),
    ],
    "bench": [
        ("data", "data sets in the formats in which they are found on disk. Nothing is downloaded"),
        ("models", "plain models to measure with: no farandole in them"),
        ("measure", "measuring: intervals, links, warm-up, machine facts, ranks on hosts"),
        ("collectives", "``farandole bench collectives``: routes compared"),
        ("cluster", "``farandole measure``: what devices, links, codecs and disks give, into `cluster.toml`"),
        ("cluster_test", "``farandole test``: a real job over all hosts that checks the set-up"),
        ("device_test", "``farandole test --device``: codecs and the engine on a device, compared with the CPU"),
        ("codecs", "``farandole bench codecs``: what each codec costs, saves and loses"),
        ("demo", "``farandole demo``: training, comparison and report on one machine"),
        ("scaling", "``farandole bench scaling``: a user's script at several sizes"),
        ("step", "``farandole bench step``: training steps, compared with DDP and others"),
    ],
    "horovod": [
        ("data", "loading data while the model computes; imports no torch"),
        ("as_horovod", "the import hook of `--as-horovod`"),
        ("mxnet", "says that there is no front end for MXNet, when it is imported"),
        ("common", "shared by all front ends: the world, process sets, errors, small helpers"),
        (
            "exchange",
            "for front ends whose tensors are not torch's: arrays, flat buckets, layouts compared once, records "
            "of steps",
        ),
        ("verify", "what ``farandole verify`` looks at in trainings that are not torch's"),
        (
            "runner",
            "starting jobs by Horovod's names: `run` for a function, ``python -m farandole.horovod.runner`` "
            "for a command",
        ),
        (".", "the version of Horovod whose names these are, and `run`"),
        ("torch/compression", "Horovod's compressors, and the codecs of the reducer"),
        ("torch/ops", "Horovod's tensor operations for PyTorch, one file for each collective"),
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
        ("tensorflow/calls", "one operation: at once, or in a graph by a kernel in C++ or a Python function"),
        ("tensorflow/ops", "Horovod's tensor operations for TensorFlow, one file for each collective"),
        ("tensorflow/functions", "variables and objects from one rank to all"),
        ("tensorflow/util", "small helpers under the names that programs import"),
        ("tensorflow/gradients", "gradients in flat buckets, exchanged in place"),
        ("keras/variables", "what differs between Keras 3 and tf_keras: variables and optimizers"),
        ("keras/watch", "trainings by `fit`, watched: seeds of each rank, warnings, and ``farandole verify``"),
        ("keras/layer", "optimizer, callbacks and loading for Keras 3, on TensorFlow and on torch"),
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

A path may have several parts (``ssh/link``) and may name one file (``report/page``, ``torch/__init__``), which is
then a level of its own. A module belongs to the longest path that fits, so a folder's folders need no own rows.
A package's ``__init__`` without a row is below all of them: it imports nothing of its package.
"""

TO_COME: set[str] = set()
"""Rows of the tables above that hold a place: nothing is there yet."""

LIMITS = {"files": 15, "attributes": 15, "keys": 60, "lines": 400}
"""The most Python files of a folder, attributes of a class, keys of a record of a file, and lines of a file."""

FILE_RECORDS = {
    "core/vocabulary/spec:Plan": "plan.toml",
    "plan/model/profile:ModelUnit": "the units in model.json",
    "plan/model/profile:ModelProfile": "model.json",
    "plan/search/result:PlanAnswer": "plan.why.json",
    "core/vocabulary/events:Sample": "the samples in events-rank*.jsonl",
}
"""Frozen records whose fields are the keys of a file that users read, and that file.

Their fields are as flat as the file: grouping them would change the format, or add a second form of the same.
"""

FRONT_DOOR = ("__init__", "__main__", "backend", "version")
"""Files of the root, which every package may import: lazy names (PEP 562), the backend's name, the version."""

ENVIRONMENT_FILE = "core/environ/env"
"""The one module that reads environment variables."""
