"""What a fix says to paste is taken where it says: by the command line, the plan, and what its Python lines call.

All kinds of findings have an example here, in the words of each loop and wrapper; a new kind without one fails.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import farandole
from farandole.core.job_plan import read_plan
from farandole.core.vocabulary.degrees import degrees_of
from farandole.core.vocabulary.events import (
    DDP,
    FRONT_ENDS,
    FSDP1,
    FSDP2,
    LOOPS,
    SETUP_ELEMENTS,
    SETUP_PLAN,
    SETUP_ROWS_IN_STEP,
)
from farandole.core.vocabulary.rules import check
from farandole.observe.diagnose import Diagnosis, Finding, diagnose
from farandole.observe.diagnose.finding import KINDS
from farandole.observe.diagnose.front_ends import in_words_of
from farandole.observe.diagnose.step_table import StepTable
from tests.unit.observe.synthetic import Machine, every, healthy, only, write_run
from tests.unit.observe.test_diagnose_truths import TRUTHS
from tests.unit.observe.test_divided_runs import Training, write
from tests.unit.observe.test_pipeline_waits import diagnosed

CPU = {"device": "cpu", "threads": 1, "cores": 1, "worker_cores": 1, "loader_workers": 0}
SMALL = {**CPU, "optimizer": "AdamW", "parameter_tensors": 600, "parameter_elements": 38_400}
EXPERTS = {
    "expert_layer": "layers.1.moe", "experts": 8, "expert_busiest": 3, "expert_imbalance": 3.1,
    "expert_dropped": 0.0, "expert_seconds": 0.010,
}  # fmt: skip
CROWD = {"process_cores": 0.25, "core_wait_share": 0.4, "machine_share": 1.0, "preemptions": 300, "cores": 2}
IN_TURN = {"forward": lambda rank, step: 0.04 * ((step * 7 + rank * 3) % 4 == 0)}
SAVED = every(20, 0.5, 0)
SLOW = healthy(bytes_per_second=200e6)
MACHINES: Mapping[str, Machine] = {
    **{f"{truth.kind} {truth.phase}": truth.machine for truth in TRUTHS.values()},
    "crowded": healthy(
        ranks=8,
        sample=dict.fromkeys(range(8), CROWD),
        facts={"cores": 2},
        setup={"cores": 2, "threads": 1, "core_list": "0-1"},
    ),
    "threads": healthy(setup={"threads": 8, "cores": 1, "device": "cpu"}),
    "own code": healthy(own_code=lambda rank, step: 0.05),
    "optimizer": healthy(setup=SMALL, extra={"optimizer": lambda rank, step: 0.05}),
    "experts": healthy(setup=EXPERTS, setup_of={1: {**EXPERTS, "expert_seconds": 0.050}}),
    "one sample": healthy(samples=lambda rank, step: 1, extra={"optimizer": lambda rank, step: 0.05}),
    "late by chance": healthy(extra=IN_TURN),
    "no rank is bound": healthy(
        extra=IN_TURN,
        facts={"typed_command": shlex.split("farandole run -np 4 --no-bind -- python t.py")},
    ),
    "a loader": healthy(setup=CPU, extra={"data": lambda rank, step: 0.1}, facts={"cores": 16}),
    "a loader that computes": healthy(
        setup=CPU, extra={"data": lambda rank, step: 0.1}, facts={"cores": 16}, data_cpu=0.9
    ),
    "saves": healthy(steps=106, extra={"checkpoint": SAVED}, setup={"checkpoint_asynchronous": True}),
    "saves of an object": healthy(
        steps=106, extra={"checkpoint": SAVED}, setup={"checkpoint_objects": '"runs/saved", model, optimizer'}
    ),
    "zero 1, slow": replace(SLOW, plan={"zero": 1}),
    "zero 2, slow": replace(SLOW, plan={"zero": 2, "data": 2, "tensor": 2}),
    "zero 3, slow": replace(
        SLOW, plan={"zero": 3}, setup={"zero": 3, "codec": "none", "weight_codec": "none", "shard_within": "world"}
    ),
    "zero 3 in the script, slow": replace(
        SLOW,
        setup={
            "zero": 3,
            "codec": "none",
            "weight_codec": "none",
            "shard_within": "world",
            SETUP_PLAN: json.dumps({"zero": 3, "recompute": "blocks"}),
        },
    ),
    "int8, slow": replace(SLOW, plan={"codec": "int8"}),
    "bbr": replace(SLOW, congestion_control="bbr", stall=every(10, 0.4), bytes_per_second=400e6),
    "meetings": replace(SLOW, plan={"sync": "local:H=4"}),
    "servers": replace(SLOW, plan={"sync": "async"}),
    "two optimizers": replace(SLOW, exchanges=3, optimizers=2),
    "no loader": replace(SLOW, setup={}),
    "by speed": healthy(extra={"backward": only(1, 0.05)}, setup=CPU),
    "passes": healthy(exchanges=4, bytes_per_second=500e6, plan={"accumulate": 2}),
}
"""Beside them are divided runs and pipelines."""
DIVIDED = (
    Training("tensor", {"tensor": 4, "sequence_parallel": True}, ranks=8, same=4, wire=0.06),
    Training("tensor", {"tensor": 2, "tensor_recipe": {"*.up": "columns"}}, same=2, wire=0.06),
    Training("tensor", {"tensor": 2}, same=2, wire=0.06, setup={SETUP_ELEMENTS: 10**6}),
    Training("context", {"context": "rest", "data": 2, "context_kind": "ring"}, ranks=4, same=2, wire=0.06),
    Training("expert", {"expert": 2}, wire=0.06),
    Training("expert", {"expert": 2, "expert_codec": "int8"}, wire=0.06),
    Training("shard", {"zero": 2}, wire=0.06, hosts=2),
    Training("shard", {"zero": 1, "overlap_gather": True}, wire=0.06, hosts=2),
    Training("rows", {}, wire=0.06, setup={SETUP_ROWS_IN_STEP: True}),
    Training("loss", {}, wire=0.06),
)


def line_of(ranks: int, plan: Mapping[str, Any]) -> list[str]:
    """Return the command that a run of such a plan had."""
    values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in plan.items())
    keys = [word for key, value in values for word in ("--set", f"{key}={value}")]
    return ["farandole", "run", "-np", str(ranks), *keys, "--", "python", "t.py"]


@functools.cache
def _found(directory: Path) -> tuple[tuple[str, Diagnosis], ...]:
    found = []
    for number, (name, usual) in enumerate(MACHINES.items()):
        machine = usual
        if machine.steps == 60 and machine.first_step_factor == 1 and not machine.sample:
            machine = replace(machine, steps=24)  # so few tell what is wrong
        facts = {"typed_command": line_of(machine.ranks, machine.plan), **machine.facts}
        found.append((name, diagnose(write_run(directory / f"m{number}", replace(machine, facts=facts)))))
    for number, run in enumerate(DIVIDED):
        facts = {"typed_command": line_of(run.ranks, run.plan)}
        found.append((f"divided {run.plan}", diagnose(write(directory / f"d{number}", replace(run, facts=facts)))))
    missing = write_run(directory / "missing", healthy(bytes_per_second=200e6))
    (missing / "events-rank3.jsonl").unlink()
    found.append(("missing", diagnose(missing)))
    for number, (slow, send, cuts) in enumerate(
        [({}, 0.0005, ()), ({2: 1.6}, 0.0005, ()), ({2: 1.6}, 0.0005, ("2",)), ({}, 0.02, ())]
    ):
        plan = {"pipeline": 4, "micro_batches": 8, "pipeline_cuts": ["1", "2", "3"] if cuts else []}
        facts = {"size": 4, "plan": plan, "typed_command": line_of(4, plan), "command": ["python", "t.py"]}
        found.append(("pipeline", diagnosed(directory / f"p{number}", 4, 1, slow, send, facts, 0.001)))
    return tuple(found)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Sequence[tuple[str, Finding]]:
    """All findings of all examples."""
    directory = tmp_path_factory.mktemp("runs")
    return [(name, each) for name, diagnosis in _found(directory) for each in diagnosis.findings]


def test_every_kind_of_finding_has_an_example(found: Sequence[tuple[str, Finding]]) -> None:
    assert {finding.kind for _, finding in found} == set(KINDS)


def test_what_is_pasted_is_taken(found: Sequence[tuple[str, Finding]]) -> None:
    pastes = [(name, fix.paste) for name, finding in found for fix in finding.fixes if fix.paste]
    assert len({paste for _, paste in pastes}) > 30
    assert not problems((paste, name, "") for name, paste in pastes)


@pytest.mark.parametrize("of", [DDP, FSDP1, FSDP2, *LOOPS, *FRONT_ENDS])
def test_it_is_taken_in_the_words_of_each_loop(of: str, found: Sequence[tuple[str, Finding]]) -> None:
    table = SimpleNamespace(
        front_end=of if of in FRONT_ENDS else "", loop=of if of in LOOPS else "",
        wrapper=of if of in (DDP, FSDP1, FSDP2) else "",
    )  # fmt: skip
    assert not problems(
        (fix.paste, name, of)
        for name, finding in found
        for fix in in_words_of(finding, cast(StepTable, table)).fixes
        if fix.paste
    )


def test_a_script_with_its_own_plan_gets_its_keys_with_the_new_ones(found: Sequence[tuple[str, Finding]]) -> None:
    pastes = [
        fix.paste
        for name, finding in found
        for fix in finding.fixes
        if name == "zero 3 in the script, slow" and fix.changes
    ]
    line = "model, optimizer = fd.distribute(model, optimizer, fd.Plan({}, recompute='blocks'{}))"
    assert {line.format("zero=3", ", weight_codec='int8'"), line.format("zero=2", "")} <= set(pastes), pastes
    assert not any("--set" in paste for paste in pastes)


def test_what_nobody_takes_fails() -> None:
    for paste in (
        "farandole run -np 2 --set zero=2 --set codec=powersgd:rank=4 -- python t.py", "fd.step_later(model)",
        "farandole run -np 3 --set tensor=2 -- python t.py", "farandole run --no-such -- python t.py",
        "fd.Plan(overlap=True)", "workers=2  # argument of the DataLoader", "micro_batches = 16",
        "if_busy = 'skip'", "with fd.accumulate(1, 2, 3):\n    loss.backward()",
    ):  # fmt: skip
        with pytest.raises(BaseException):  # noqa: B017, PT011 - a parser's exit too
            take(paste, "")


def problems(pastes: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return what nobody takes, each once."""
    found = {}
    for paste, name, of in pastes:
        try:
            take(paste, name, of)
        except (Exception, SystemExit) as problem:
            found[paste] = f"{name}: {paste!r}: {problem}"
    return list(found.values())


# -- who takes what ------------------------------------------------------------------------------


def take(paste: str, where: str, of: str = "") -> None:
    """Raise if nobody would take these lines."""
    first = shlex.split(paste, comments=True)[:1]
    if first == ["farandole"]:
        return _command(shlex.split(paste.splitlines()[0]))
    if first[0].partition("=")[0].isupper() or first[0] in ("sysctl", "ethtool", "rsync", "top", "free"):
        assert "\n" not in paste, (where, paste)
        return None
    if " # argument" in paste:
        return _arguments(*paste.split("  # argument", 1), of=of, where=where)
    return _python(paste, where, of)


def _command(words: Sequence[str]) -> None:
    name = words[1]
    if name == "bench":
        return None if words[2:] == ["collectives", "--hosts", "2"] else pytest.fail(shlex.join(words))
    options = importlib.import_module(f"farandole.cli.commands.{name}").make_parser().parse_args(words[2:])
    if name == "doctor":
        return None
    assert name in ("run", "emulate"), words
    plan = read_plan(options.plan, options.settings)
    if plan is not None:
        size = options.size if name == "run" else options.hosts * options.slots
        check({**vars(plan), **degrees_of(plan, size).above_one()})
    return None


CALLED: Mapping[str, Callable[..., Any]] = {
    "the DataLoader": DataLoader,
    "fully_shard": fully_shard,
    "DistributedDataParallel": DistributedDataParallel,
    "fd.RowTable": farandole.RowTable,
    "fd.Checkpointer": farandole.Checkpointer,
    "farandole.MixtureOfExperts": farandole.MixtureOfExperts,
}
OF_LIGHTNING = {"Trainer": {"accumulate_grad_batches"}, "ModelCheckpoint": {"every_n_train_steps"}}
"""Not imported here, where other tests ask what is said without the package."""
KERAS = ("fit, or of dataset.batch", "hvd.DistributedOptimizer", "the optimizer")
"""Named in `test_front_end_fixes`; neither package is loaded here."""


def _arguments(code: str, of_what: str, *, of: str, where: str) -> None:
    called = of_what.removeprefix("s").removeprefix(" of ").partition(",")[0]
    call = ast.parse(f"called({code})", mode="eval").body
    assert isinstance(call, ast.Call)
    assert call.keywords, (where, code)
    if called == "TrainingArguments":
        transformers = pytest.importorskip("transformers")
        fields = transformers.TrainingArguments.__dataclass_fields__
        assert {each.arg for each in call.keywords} <= set(fields), (where, code)
        return
    if called in OF_LIGHTNING:
        assert {each.arg for each in call.keywords} <= OF_LIGHTNING[called], (where, code)
        return
    if of in FRONT_ENDS and f"{of_what.removeprefix(' of ')}" in KERAS:
        return
    taker = CALLED.get(called) or getattr(torch.optim, called.removeprefix("torch.optim."))
    _bind(taker, call, where)


NAMES: Mapping[str, Any] = {
    "farandole": farandole, "fd": farandole, "torch": torch, "DistributedSampler": DistributedSampler,
    "checkpointer": farandole.Checkpointer,
}  # fmt: skip
MODELS: Mapping[str, Any] = {DDP: DistributedDataParallel, FSDP1: FullyShardedDataParallel, FSDP2: FSDPModule}
OWN = {"model", "optimizer", "loader", "loss", "dataset", "loss_function", "contextlib", "gc", "inputs", "tf"}
"""What the script has, or what a line before it imports."""


def _python(paste: str, where: str, of: str) -> None:
    body = f"{paste}\n    pass" if paste.rstrip().endswith(":") else paste
    nodes = list(ast.walk(ast.parse(body)))
    for name in (name.name for node in nodes if isinstance(node, ast.Import) for name in node.names):
        importlib.import_module(name)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    assert calls, f"{where}: nobody could say where this belongs: {paste!r}"
    for call in calls:
        root, *path = _dotted(call.func)
        if root == "model" and path and of in MODELS and path[0] not in ("compile", "fit"):
            _bind(getattr(MODELS[of], path[0]), call, where, is_method=True)
        elif root in NAMES:
            taker = functools.reduce(getattr, path, NAMES[root])
            _bind(taker, call, where, is_method=root == "checkpointer")
        else:
            assert root in OWN, (where, paste, root)


def _dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    return [node.id] if isinstance(node, ast.Name) else [""]


def _bind(taker: Callable[..., Any], call: ast.Call, where: str, *, is_method: bool = False) -> None:
    """Raise if `taker` has no such arguments; `called(...)` has some of them, the script has the others."""
    if inspect.isbuiltin(taker):
        return  # written in C: it has no signature
    signature = inspect.signature(taker)
    bind = signature.bind_partial if ast.unparse(call.func) == "called" else signature.bind
    bind(*[...] * (len(call.args) + is_method), **{str(each.arg): ... for each in call.keywords})
