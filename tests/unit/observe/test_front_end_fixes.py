"""Fixes of findings in the words of TensorFlow and Keras, one by one. Runs of them: `ranks/test_keras_records`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from farandole.core.vocabulary.codec_spec import AUTO
from farandole.core.vocabulary.events import (
    DATA,
    DDP,
    END_OF_EPOCH,
    EVALUATION,
    FORWARD,
    FRONT_ENDS,
    FSDP1,
    FSDP2,
    LIGHTNING,
    LOOPS,
    TRAINER,
    WRAPPERS,
)
from farandole.observe.diagnose.finding import Finding, Fix, Gain
from farandole.observe.diagnose.front_ends import in_words_of
from farandole.observe.diagnose.step_table import StepTable, held_passes

TENSORFLOW, KERAS, ON_TORCH = FRONT_ENDS
GAIN = Gain(0.5, "as measured")
TUNED = Fix("let the tuner choose", "--set codec=auto", GAIN, {"codec": AUTO})
INT8 = Fix("codec int8", "farandole run --plan int8.toml -- python train.py", GAIN, {"codec": "int8"})
PASSES = Fix("exchange less often", "--set accumulate=4", GAIN, {"accumulate": 4})
TCP = Fix("TCP that is not paced", "--set congestion_control=reno", GAIN, {"congestion_control": "reno"})
BATCH = Fix("a larger batch", "batch_size=64  # argument of the DataLoader", GAIN, {"loader_batch": 64})
SHARD = Fix("divide the samples evenly", "loader = fd.shard(loader)", GAIN)
WORKERS = Fix("load beside the training", "num_workers=2", GAIN, {"loader_workers": 2})
COMPILE = Fix("launch fewer operations", "model = torch.compile(model)", GAIN)
RARER = Fix("do it less often", "", GAIN)
BESIDE = Fix("copy the state to host memory in the step")


def told(front_end: str, kind: str, *fixes: Fix, phase: str = "") -> tuple[Fix, ...]:
    """Return the fixes of such a finding where this front end trains; nothing else of it changes."""
    finding = Finding(kind, "a title", 0.5, 0.25, (1,), ("b",), phase, ("seen",), fixes)
    table = SimpleNamespace(
        front_end=front_end if front_end in FRONT_ENDS else "", loop=front_end if front_end in LOOPS else "",
        wrapper=front_end if front_end in WRAPPERS else "",
    )  # fmt: skip
    found = in_words_of(finding, cast(StepTable, table))
    assert {**vars(found), "fixes": ()} == {**vars(finding), "fixes": ()}
    return found.fixes


def test_a_loop_of_torch_has_the_fixes_as_they_are() -> None:
    everything = (TUNED, INT8, PASSES, TCP, BATCH, SHARD, WORKERS, COMPILE)
    assert told("", "communication", *everything) == everything
    assert told("", "other", RARER) == (RARER,)


@pytest.mark.parametrize(
    ("fix", "paste"),
    [
        (INT8, INT8.paste),
        (BATCH, "per_device_train_batch_size=64  # arguments of TrainingArguments"),
        (Fix("", "num_workers=2, prefetch_factor=4  # arguments of the DataLoader"),
         "dataloader_num_workers=2, dataloader_prefetch_factor=4  # arguments of TrainingArguments"),
        (Fix("", "fused=True  # argument of torch.optim.AdamW"),
         'optim="adamw_torch_fused"  # arguments of TrainingArguments'),
        (Fix("do checkpoint 4 times less often, every 8 steps instead of 2"),
         'save_strategy="steps", save_steps=8  # arguments of TrainingArguments'),
        (Fix("do evaluation 4 times less often, every 8 steps instead of 2"), ""),
    ],
)  # fmt: skip
def test_a_trainer_has_arguments(fix: Fix, paste: str) -> None:
    later = Fix("save while training goes on", "checkpointer = fd.Checkpointer(model)")
    (found,) = told(TRAINER, "pause", later, fix)
    assert (found.what, found.paste) == (fix.what, paste)


HELD = Fix("step less often", held_passes(2, steps=True), GAIN)
STEP = "if (i + 1) % 2 == 0:\n    optimizer.step()\n    optimizer.zero_grad()  # here alone"
PASS = ":\n    loss = loss_function(model(inputs), targets)\n    loss.backward()"
INIT = "import farandole as fd\nfd.init()"
RECORD = "fd.record(model, optimizer, loader)  # before the loop"


@pytest.mark.parametrize(
    ("wrapper", "fix", "paste"),
    [
        ("", HELD, HELD.paste),
        (TRAINER, HELD, "gradient_accumulation_steps=2  # arguments of TrainingArguments"),
        (LIGHTNING, HELD, "accumulate_grad_batches=2  # argument of Trainer"),
        (TENSORFLOW, HELD, "backward_passes_per_step=2  # argument of hvd.DistributedOptimizer"),
        (DDP, HELD, "import contextlib\nwith model.no_sync() if (i + 1) % 2 > 0 else contextlib.nullcontext()"
         f"{PASS}\n{STEP}"),
        (FSDP1, PASSES, "import contextlib\nwith model.no_sync() if (i + 1) % 4 > 0 else contextlib.nullcontext()"
         f"{PASS}"),
        (FSDP2, HELD, f"model.set_requires_gradient_sync(not ((i + 1) % 2 > 0))\nloss.backward()\n{STEP}"),
        (DDP, Fix("once", "with fd.accumulate():\n    loss.backward()  # all but the last"),
         f"with model.no_sync(){PASS}  # all but the last"),
        (FSDP2, INT8, f"{INIT}  # instead of fully_shard\n"
         "model, optimizer = fd.distribute(model, optimizer, fd.Plan(zero=3, codec='int8'))\n"
         f"{RECORD}"),
        (FSDP2, Fix("whole on every rank", "--set zero=2", GAIN, {"zero": 2}),
         "reshard_after_forward=False  # argument of fully_shard, for each block"),
        (DDP, INT8, f"{INIT}  # instead of {DDP}\n"
         "model, optimizer = fd.distribute(model, optimizer, fd.Plan(codec='int8'))\n"
         f"{RECORD}"),
        (DDP, Fix("larger buckets", "--set bucket_bytes=50MiB", GAIN, {"bucket_bytes": "50MiB"}),
         "bucket_cap_mb=50  # argument of DistributedDataParallel"),
        (DDP, SHARD, "sampler=DistributedSampler(dataset)  # argument of the DataLoader, not shuffle="),
        (DDP, Fix("ahead", "x = fd.prefetch(x)"), "import farandole as fd\nx = fd.prefetch(x)"),
        (DDP, Fix("name it", 'with fd.phase("name"):'),
         f'import farandole as fd\n{RECORD}\nwith fd.phase("name"):'),
        (DDP, BATCH, BATCH.paste),
        (DDP, Fix("skip", 'if_busy="skip"  # argument of fd.Checkpointer'),
         'if_busy="skip"  # argument of fd.Checkpointer'),
        (DDP, COMPILE, COMPILE.paste),
    ],
)  # fmt: skip
def test_a_script_without_our_start_is_told_what_its_wrapper_knows(wrapper: str, fix: Fix, paste: str) -> None:
    (found,) = told(wrapper, "communication", fix)
    assert found.paste == paste


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(
    ("fix", "paste", "changes"),
    [
        (INT8, INT8.paste, {"codec": "int8"}),
        (TUNED, TUNED.paste, {"codec": AUTO}),
        (PASSES, "backward_passes_per_step=4  # argument of hvd.DistributedOptimizer", {"accumulate": 4}),
        (TCP, "sysctl -w net.ipv4.tcp_congestion_control=reno  # on every host", {}),
        (BATCH, "batch_size=64  # argument of fit, or of dataset.batch", {"loader_batch": 64}),
        (SHARD, "import farandole.keras\ndataset = farandole.keras.shard(dataset)", {}),
    ],
    ids=["codec", "auto", "passes", "tcp", "batch", "shard"],
)
def test_what_a_fix_becomes(front_end: str, fix: Fix, paste: str, changes: dict[str, object]) -> None:
    (found,) = told(front_end, "communication", fix)
    assert (found.what, found.paste, found.gain, dict(found.changes)) == (fix.what, paste, GAIN, changes)


@pytest.mark.parametrize(("kind", "phase"), [("input", DATA), ("straggler", DATA)])
def test_slow_data_is_cured_by_tf_data_and_on_torch_by_the_loader(kind: str, phase: str) -> None:
    for front_end in (TENSORFLOW, KERAS):
        ahead, less = told(front_end, kind, WORKERS, phase=phase)
        assert "prefetch(tf.data.AUTOTUNE)" in ahead.paste
        assert "dataset.cache()" in less.what
    assert told(ON_TORCH, kind, WORKERS, phase=phase) == (WORKERS,)


def test_a_rank_that_computes_late_is_not_told_of_tf_data() -> None:
    assert told(KERAS, "straggler", RARER, phase=FORWARD) == (RARER,)


@pytest.mark.parametrize("kind", ["launch", "memory"])
def test_fixes_that_are_torch_s_own_are_left_out_where_torch_does_not_compute(kind: str) -> None:
    for front_end in (TENSORFLOW, KERAS):
        assert told(front_end, kind, COMPILE) == ()
        assert told(front_end, kind, RARER) == (RARER,), "names nothing of torch's"
    assert told(ON_TORCH, kind, COMPILE) == (COMPILE,)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_pauses_are_those_of_fit(front_end: str) -> None:
    first, second = told(front_end, "pause", RARER, BESIDE, phase=EVALUATION)
    assert first == RARER
    assert "validation_freq=" in second.what
    (only,) = told(front_end, "pause", RARER, BESIDE, phase=END_OF_EPOCH)
    assert "rank 0 alone" in only.what
    assert only.gain == GAIN
    assert told(front_end, "pause", RARER, BESIDE, phase="checkpoint") == (RARER, BESIDE)


def test_time_between_two_batches_is_that_of_callbacks_where_keras_has_the_loop() -> None:
    evidence = ("ranks 0 and 1", "the loader is not timed (give it to fd.shard or fd.record)")
    own = Finding("other", "the script's own code takes 0.5 s", 0.5, 0.25, evidence=evidence, fixes=(RARER,))
    for front_end in (KERAS, ON_TORCH):
        found = in_words_of(own, cast(StepTable, SimpleNamespace(front_end=front_end, loop="")))
        assert found.title == "callbacks, and Keras's own loop, between two batches take 500 ms a step (25%)"
        assert found.evidence == evidence[:1]
        assert "steps_per_execution=8" in found.fixes[0].paste
        assert found.fixes[0].gain == GAIN
    assert told(TENSORFLOW, "other", RARER) == (RARER,), "a loop of the script's own"


def test_time_in_a_loop_that_is_not_the_users_is_that_of_its_callbacks() -> None:
    evidence = ("seen", "give the loader to fd.shard or fd.record")
    finding = Finding("other", "your own code", 0.5, 0.25, (1,), (), "", evidence, (Fix("mark it", "x", GAIN),))
    table = SimpleNamespace(front_end="", loop=LIGHTNING, wrapper="")
    found = in_words_of(finding, cast(StepTable, table))
    assert found.title.startswith("callbacks, and the loop of lightning, between two steps take"), found.title
    assert (found.evidence, [fix.paste for fix in found.fixes]) == (("seen",), [""])


def test_a_strategy_that_shards_nothing_gets_no_key_of_shards() -> None:
    table = cast(StepTable, SimpleNamespace(front_end="", loop=LIGHTNING, wrapper=FSDP2))
    shards = Fix("parameters as 8-bit numbers", "--set weight_codec=int8", GAIN, {"weight_codec": "int8"})
    found = in_words_of(Finding("communication", "a title", 0.5, 0.25, (), (), "", (), (shards, PASSES)), table)
    assert [fix.paste for fix in found.fixes] == ["accumulate_grad_batches=4  # argument of Trainer"]
