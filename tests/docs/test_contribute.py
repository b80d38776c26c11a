"""Each recipe of docs/contribute.md works: its blocks change a copy of the product, which trains or diagnoses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import warm
from tests.unit.observe.synthetic import healthy, write_run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contribute.md"
RECIPES = ("A codec", "A strategy", "A finder", "A launcher")
PRODUCT = Path("src") / "farandole"


class Change(NamedTuple):
    """One block, or one place of a diff."""

    path: str
    old: str
    """Empty: a new file."""
    new: str


def recipes() -> dict[str, str]:
    """Return the text of each recipe, by its heading."""
    part = PAGE.read_text().partition("\n## Recipes\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^### |\Z)", part, re.M | re.S))


def changes(recipe: str) -> list[Change]:
    """Return what the blocks of a recipe change, in their order."""
    found = []
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```$", recipe, re.M | re.S):
        first, _, rest = block.partition("\n")
        assert (kind, first[: first.find(" ")]) in (("python", "#"), ("diff", "---")), f"{kind}: {first}"
        path = first.partition(" ")[2]
        if kind == "python":
            found.append(Change(path, "", rest))
            continue
        for place in re.split(r"^@@\n", rest, flags=re.M):
            lines = place.splitlines(keepends=True)
            assert all(line[0] in " +-" for line in lines), f"{path}: no line of a diff in {place}"
            old, new = ("".join(line[1:] for line in lines if line[0] != other) for other in "+-")
            assert old, f"{path}: where do these lines belong? {place}"
            found.append(Change(path, old, new))
    return found


def apply(recipe: str, root: Path) -> None:
    """Change the copy of the product below `root` as the recipe says."""
    for change in changes(recipe):
        file = root / change.path
        assert file.is_relative_to(root / PRODUCT), change.path
        if not change.old:
            assert not file.exists(), f"{change.path} is there already: the recipe needs another example"
            file.write_text(change.new)
            continue
        text = "\n" + file.read_text()
        assert text.count(f"\n{change.old}") == 1, f"{change.path} has not once, as the recipe says:\n{change.old}"
        file.write_text(text.replace(f"\n{change.old}", f"\n{change.new}")[1:])


Followed = Callable[[str], Path]


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    """Return what follows a recipe, and returns a folder whose `src` has the product with it."""

    def follow(heading: str) -> Path:
        shutil.copytree(ROOT / PRODUCT, tmp_path / PRODUCT)
        apply(recipes()[heading], tmp_path)
        return tmp_path

    return follow


def path_of(root: Path) -> dict[str, str]:
    """Return the environment in which `import farandole` finds the copy."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(root / "src"), os.environ.get("PYTHONPATH")]))}


def train(root: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks, by the copy."""
    (root / "train.py").write_text(f"import farandole as fd\n{script}\nfd.print('by', fd.__file__)\n")
    words = ("run", "-np", "2", *options, "--", sys.executable, "train.py")
    done = warm.run(root, *words, environment=path_of(root), timeout=50)
    assert done.returncode or f"by {root}" in done.stdout, done.stdout + done.stderr
    return done


def numbers(done: subprocess.CompletedProcess[str], name: str) -> list[float]:
    """Return the numbers of the line that begins with a name."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(rf"(?:^|\] ){name}: (.*)$", done.stdout, re.M)
    assert len(lines) == 1, done.stdout + done.stderr
    return [float(word) for word in lines[0].split()]


def test_the_recipes_are_those_that_are_followed_here() -> None:
    assert tuple(recipes()) == RECIPES
    assert all(changes(recipe) for recipe in recipes().values())


def test_all_recipes_fit_the_source_together(tmp_path: Path) -> None:
    shutil.copytree(ROOT / PRODUCT, tmp_path / PRODUCT, ignore=shutil.ignore_patterns("__pycache__"))
    for recipe in recipes().values():
        apply(recipe, tmp_path)


def test_a_recipe_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / PRODUCT / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text("one = 1\ntwo = 2\n")
    diff = "```diff\n--- src/farandole/a.py\n{}```\n"
    apply(diff.format(" one = 1\n+more = 0\n@@\n-two = 2\n+two = 3\n"), tmp_path)
    assert file.read_text() == "one = 1\nmore = 0\ntwo = 3\n"
    for wrong in (" two = 2\n+more = 1\n", "+more = 1\n", "one = 1\n+more = 1\n", " = 1\n+more = 1\n"):
        with pytest.raises(AssertionError):
            apply(diff.format(wrong), tmp_path)
    with pytest.raises(AssertionError, match="another example"):
        apply("```python\n# src/farandole/a.py\n```\n", tmp_path)


# -- a codec -------------------------------------------------------------------------------------

CODEC = """
import torch
from torch import nn

here = fd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 4))
draw = torch.Generator().manual_seed(here.rank)
batches = [torch.randn(64, 64, generator=draw) for _ in range(100)]
compute = lambda inputs: nn.functional.mse_loss(model(inputs), inputs[:, :4])
weight = model[0].weight
(mine,) = torch.autograd.grad(compute(batches[0]), [weight])
both = fd.gather(mine[None])
model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.3))
total = torch.zeros_like(weight)
for step in range(150):
    inputs = batches[max(0, step - 50)]
    optimizer.param_groups[0]["lr"] = 0.0 if step < 50 else 0.3  # at first the gradient stays what it is
    loss = compute(inputs)
    optimizer.zero_grad()
    loss.backward()
    if step == 0:
        fd.print("wrong by:", ((weight.grad - wanted(both)).abs().max() / weight.grad.abs().max()).item())
    total += weight.grad if step < 50 else 0.0
    optimizer.step()
fd.print("lost:", ((total / 50 - both.mean(0)).abs().max() / both.mean(0).abs().max()).item())
fd.print("loss:", fd.mean(compute(batches[0])))
assert fd.verify(model, optimizer)
"""
PLAIN = "def wanted(both):\n    return both.mean(0)\n"
CODED = """
def wanted(both):
    sizes = both.abs()
    chosen = sizes >= 0.3 * sizes.amax((1, 2), keepdim=True)
    scale = (sizes * chosen).sum((1, 2), keepdim=True) / chosen.sum((1, 2), keepdim=True)
    return (both.sign() * chosen * scale).mean(0)
"""


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_a_codec(followed: Followed) -> None:
    root = followed("A codec")
    plain, coded = train(root, PLAIN + CODEC), train(root, CODED + CODEC, "--set", "codec=ternary")
    for done in (plain, coded):
        assert numbers(done, "wrong by")[0] < 1e-5, "the mean is another one"
        assert numbers(done, "lost")[0] < 0.1, "what is not sent is sent later"
    assert numbers(coded, "loss")[0] == pytest.approx(numbers(plain, "loss")[0], abs=0.03)
    assert numbers(coded, "loss") != numbers(plain, "loss")
    refused = train(root, CODED + CODEC, "--set", "codec=ternary:2")
    assert refused.returncode, refused.stdout
    assert "ternary:2': least = 2, expected a share above 0 and at most 1" in refused.stderr, refused.stderr


# -- a strategy ----------------------------------------------------------------------------------

STRATEGY = """
import torch
from torch import nn

here = fd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
draw = torch.Generator().manual_seed(here.rank)
for _ in range(10):
    inputs = torch.randn(8, 3, 8, 8, generator=draw)
    loss = nn.functional.mse_loss(model(inputs), inputs[:, :2, 0, 0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
fd.print("strides:", *model[0].weight.stride())
fd.print("loss:", fd.mean(loss))
"""
KEY = "memory_format=channels_last"


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_a_strategy(followed: Followed) -> None:
    root = followed("A strategy")
    plain, changed = train(root, STRATEGY), train(root, STRATEGY, "--set", KEY)
    assert numbers(plain, "strides") == [27, 9, 3, 1]
    assert numbers(changed, "strides") == [27, 1, 9, 3]
    assert numbers(changed, "loss")[0] == pytest.approx(numbers(plain, "loss")[0], rel=1e-5)
    for settings, says in (
        (["memory_format=nchw"], "memory_format: expected one of 'contiguous', 'channels_last', got 'nchw'"),
        ([KEY, "zero=3"], '"channels_last" with zero = 3: FSDP2 shards contiguous parameters only'),
    ):
        refused = train(root, STRATEGY, *(word for setting in settings for word in ("--set", setting)))
        assert refused.returncode, refused.stdout
        assert says in refused.stderr, refused.stderr
    refused = train(root, SLOWING, "--set", KEY)
    assert refused.returncode, refused.stdout
    assert "no parameter of this model has 4 dimensions; leave memory_format out" in refused.stderr, refused.stderr


# -- a finder ------------------------------------------------------------------------------------

SLOWING = """
import time
import torch
from torch import nn

fd.init()
model, seen = nn.Linear(8, 8), []
def keep(*_):
    seen.append(None)
    time.sleep(0.02 + 0.0003 * len(seen))
model.register_forward_hook(keep)
model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(60):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


def found(root: Path, run: Path) -> tuple[dict[str, float], str]:
    """Return the seconds of a step by kind that the copy's `farandole diagnose` finds, and what it prints."""
    printed = []
    for words in (["--json"], []):
        line = [sys.executable, "-m", "farandole", "diagnose", str(run), *words]
        done = subprocess.run(
            line, cwd=root, capture_output=True, text=True, timeout=40, check=False,
            env={**os.environ, **path_of(root)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    return {each["kind"]: each["seconds"] for each in json.loads(printed[0])["findings"]}, printed[1]


def test_a_finder(followed: Followed) -> None:
    root = followed("A finder")
    longer = write_run(root / "longer", healthy(extra={"forward": lambda rank, step: 0.001 * step}))
    kinds, text = found(root, longer)
    # 54 steps after the warm-up, 13 a quarter: the medians are 0, 13, 26 and 39 ms above the first.
    assert kinds["slowing"] == pytest.approx(0.0195, abs=0.002), text
    assert "[slowing] steps take longer and longer: " in text, text
    kinds, text = found(root, write_run(root / "alike", healthy()))
    assert "slowing" not in kinds, text


@pytest.mark.full("slow")
def test_a_finder_in_a_run_that_was_recorded(followed: Followed) -> None:
    root = followed("A finder")
    done = train(root, SLOWING, "--run-dir", "runs/longer")
    assert done.returncode == 0, done.stdout + done.stderr
    kinds, text = found(root, root / "runs" / "longer")
    assert kinds["slowing"] == pytest.approx(0.3e-3 * 60 * 3 / 8, rel=0.5), text
    assert "[slowing] steps take longer and longer: " in text, text


# -- a launcher ----------------------------------------------------------------------------------

PLACE = """
import farandole as fd
here = fd.init()
print(here.source, here.rank, here.size, here.local_rank, here.local_size, fd.mean(here.rank), fd.__file__)
fd.shutdown()
"""


def started(root: Path, names: Sequence[dict[str, str]]) -> list[str]:
    """Start a process for each set of variables; return what each prints."""
    (root / "place.py").write_text(PLACE)
    with ExitStack() as open_files:
        outs = [open_files.enter_context((root / f"{rank}.txt").open("w")) for rank in range(len(names))]
        ranks = [
            warm.start(root, "place.py", out=out, err=out, environment=path_of(root) | own)
            for out, own in zip(outs, names, strict=True)
        ]
        codes = [rank.wait(timeout=40) for rank in ranks]
    printed = [(root / f"{rank}.txt").read_text() for rank in range(len(names))]
    assert codes == [0] * len(names), printed
    return printed


def test_a_launcher(followed: Followed) -> None:
    root = followed("A launcher")
    job = {"FLUX_JOB_ID": f"f{os.getpid()}", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "1", "PMI_SIZE": "2"}
    numbers = [dict.fromkeys(("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "PMI_RANK"), each) for each in ("0", "1")]
    printed = started(root, [job | each for each in numbers])
    for rank, line in enumerate(printed):
        assert line.startswith(f"Flux {rank} 2 {rank} 2 0.5 {root}"), line
