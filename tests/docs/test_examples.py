"""The examples run, alone and on two ranks, and the README tells the truth."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from farandole.cli.main import COMMANDS
from farandole.core.vocabulary.codec_spec import OPTIONS
from tests.unit.bench.test_data import FASHION
from tests.warm import python, run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def test_the_difference_of_the_loop_is_three_lines() -> None:
    before, after = ((EXAMPLES / f"loop_{name}.py").read_text().splitlines() for name in ("before", "after"))
    changed = [line for line in difflib.ndiff(before, after) if line[:2] in ("+ ", "- ") and line[2:].strip()]
    code = [line for line in changed if '"""' not in line and "import farandole" not in line]
    assert code == [
        "+ fd.init()",
        "+ model, optimizer = fd.distribute(model, optimizer)",
        "+ loader = fd.shard(loader)",
    ]


def last_loss(text: str) -> float:
    return float(text.strip().splitlines()[-1].split()[-1])


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_the_loop_before_and_after(tmp_path: Path) -> None:
    for name in ("before", "after"):
        alone = python(tmp_path, str(EXAMPLES / f"loop_{name}.py"), timeout=50)
        assert alone.returncode == 0, alone.stderr
        assert last_loss(alone.stdout) < 0.9
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, str(EXAMPLES / "loop_after.py"))
    assert result.returncode == 0, result.stderr
    assert last_loss(result.stdout) < 0.9


@pytest.mark.full("further")
@pytest.mark.parametrize("words", [[], ["--plan-from-command"]])
def test_accumulation(tmp_path: Path, words: list[str]) -> None:
    setting = ["--set", "accumulate=4"] if words else []
    name = str(EXAMPLES / "accumulation.py")
    result = run(tmp_path, "run", "-np", "2", *setting, "--json", "--", sys.executable, name, *words)
    assert result.returncode == 0, result.stderr
    assert last_loss([line for line in result.stderr.splitlines() if "epoch" in line][-1]) < 1.0
    assert '"steps": 24' in result.stdout, "3 epochs of 32 batches, 4 a step"


@pytest.mark.full("slow")
def test_a_long_document_on_two_ranks_is_that_of_one(tmp_path: Path) -> None:
    words = [str(EXAMPLES / "long_document.py"), "--length", "256", "--documents", "6"]
    alone = python(tmp_path, *words, timeout=50)
    assert alone.returncode == 0, alone.stderr
    result = run(tmp_path, "run", "-np", "2", "--set", "context=2", "--", sys.executable, *words)
    assert result.returncode == 0, result.stderr
    assert abs(last_loss(result.stdout) - last_loss(alone.stdout)) < 2e-4, result.stdout + alone.stdout


@pytest.mark.full("slow")
def test_the_language_model(tmp_path: Path) -> None:
    name = str(EXAMPLES / "language_model.py")
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, name, "--steps", "60")
    assert result.returncode == 0, result.stderr
    match = re.search(r"loss (\d\.\d+) after 60 steps", result.stdout)
    assert match is not None
    assert float(match.group(1)) < 4.5


@pytest.mark.full("slow")
def test_the_mixture_of_experts(tmp_path: Path) -> None:
    name = str(EXAMPLES / "mixture_of_experts.py")
    result = run(tmp_path, "run", "-np", "2", "--set", "expert=2", "--", sys.executable, name, "--steps", "30")
    assert result.returncode == 0, result.stderr
    assert "2 of 4 experts on rank 0" in result.stdout, result.stdout
    match = re.search(r"loss (\d\.\d+) after 30 steps", result.stdout)
    assert match is not None, result.stdout
    assert float(match.group(1)) < 5.0, "it learns"
    assert "no longer train one model" not in result.stderr, "ranks have different experts on purpose"


@pytest.mark.full("slow")
def test_the_recommender(tmp_path: Path) -> None:
    """Real time is better than a batch job, and sends a small part of what dense tensors would."""
    name = str(EXAMPLES / "recommender.py")
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, name, "--steps", "180", timeout=55)
    assert result.returncode == 0, result.stderr
    online, by_batch, known = (float(each) for each in re.findall(r"not seen, .*: (\d\.\d+)", result.stdout))
    assert known < online < by_batch, result.stdout
    assert re.search(r"served rows are at most \d+\.\d\d s and 5 steps old", result.stdout), result.stdout
    pushed, refreshed = (float(each) for each in re.findall(r": (\d+\.\d)% less", result.stdout))
    assert pushed > 90, result.stdout
    assert refreshed > 80, result.stdout


@pytest.mark.full("slow")
def test_the_image_classifier(tmp_path: Path) -> None:
    if not FASHION.is_dir():
        pytest.skip("needs Debian's dataset-fashion-mnist")
    words = [str(EXAMPLES / "image_classifier.py"), "--data", str(FASHION), "--images", "3000"]
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, *words, timeout=55)
    assert result.returncode == 0, result.stderr
    match = re.search(r"accuracy (0\.\d+) on 10000 images", result.stdout)
    assert match is not None
    assert float(match.group(1)) > 0.5


@pytest.mark.full("slow")
def test_the_resnet_in_a_pipeline(tmp_path: Path) -> None:
    if not FASHION.is_dir():
        pytest.skip("needs Debian's dataset-fashion-mnist")
    words = [str(EXAMPLES / "resnet_pipeline.py"), "--data", str(FASHION), "--images", "2000"]
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, *words, "--schedule", "zb-h1", timeout=55)
    assert result.returncode == 0, result.stderr
    match = re.search(r"last loss (\d\.\d+)", result.stdout)
    assert match is not None, result.stdout
    assert float(match.group(1)) < 1.5, "it learns"


@pytest.mark.full("slow")
def test_the_resnet_with_sharded_states_in_bfloat16(tmp_path: Path) -> None:
    if not FASHION.is_dir():
        pytest.skip("needs Debian's dataset-fashion-mnist")
    words = [str(EXAMPLES / "resnet_zero.py"), "--data", str(FASHION), "--images", "2000", "--width", "8"]
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, *words, timeout=55)
    assert result.returncode == 0, result.stderr
    match = re.search(r"states: (\d+) bytes on this rank, (\d+) in all", result.stdout)
    assert match is not None, result.stdout
    assert int(match[1]) < 0.55 * int(match[2]), match[0]
    accuracy = re.search(r"accuracy (0\.\d+) on 1000 images", result.stdout)
    assert accuracy is not None, result.stdout
    assert float(accuracy[1]) > 0.5, accuracy[0]


@pytest.mark.full("slow")
def test_a_llama_of_transformers_with_divided_layers(tmp_path: Path) -> None:
    name = str(EXAMPLES / "llama_tensor.py")
    done = run(tmp_path, "run", "-np", "2", "--", sys.executable, name, "--steps", "40", timeout=55)
    assert done.returncode == 0, done.stderr
    match = re.search(r"parameters: (\d+) on this rank, (\d+) in all", done.stdout)
    assert match is not None, done.stdout
    assert int(match[1]) < 0.51 * int(match[2]), match[0]
    assert last_loss(done.stdout.replace(" after 40 steps", "")) < 1.0, done.stdout


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "says", "most", "one_process"),
    [
        # Where a pipeline cuts a model goes by measured times.
        pytest.param(
            "gpt_3d", r"pipeline 2 x data 2 x tensor 2: (\d+) of (\d+) parameters on this rank", 0.8,
            ["--set", "micro_batches=4"], marks=pytest.mark.full("further"),
        ),
        ("llama_3d", r"data 2 x shard 2 x tensor 2: (\d+) elements of states on this rank, of (\d+)", 0.26, []),
    ],
    ids=["gpt", "llama"],
)  # fmt: skip
def test_a_model_over_three_degrees_trains_as_one_process(
    name: str, says: str, most: float, one_process: list[str], tmp_path: Path
) -> None:
    words = ["--", sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", "20"]
    done = run(tmp_path, "run", "-np", "8", "--plan", str(EXAMPLES / f"{name}.toml"), *words, timeout=100)
    assert done.returncode == 0, done.stderr
    match = re.search(says, done.stdout)
    assert match is not None, done.stdout
    assert int(match[1]) < most * int(match[2]), match[0]
    alone = run(tmp_path, "run", "-np", "1", *one_process, "--set", "clip_norm=1.0", *words, timeout=55)
    several, one = (
        [float(each) for each in re.findall(r"step \d+: loss (\d\.\d+)", each.stdout)] for each in (done, alone)
    )
    assert len(one) == 2, alone.stdout
    assert several == pytest.approx(one, abs=2e-4), "the losses of one process"


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_a_plan_is_found_and_trains(tmp_path: Path) -> None:
    name = EXAMPLES / "planned.py"
    words = [f"{name}:make_model", "--batch", f"{name}:make_batch", "--loss", f"{name}:loss", "--gpus", "2"]
    words += ["--cluster", "4xrtx-4090+25gbe", "--global-batch", "64", "--fix", "accumulate=1", "--effort", "100"]
    found = run(tmp_path, "plan", *words, "--out", "plan.toml", timeout=60)
    assert found.returncode == 0, found.stderr
    assert "Rejected, with the best plan of each kind" in found.stdout
    line = ["run", "-np", "2", "--plan", "plan.toml", "--", sys.executable, str(name), "--steps", "20"]
    done = run(tmp_path, *line, timeout=60)
    assert done.returncode == 0, done.stderr
    assert last_loss(done.stdout.replace(" after 20 steps", "")) < 5.0, done.stdout
    assert "predicted     measured" in done.stdout + done.stderr, "the run is not held to its plan"
    assert "no test of the prediction" not in done.stdout + done.stderr, "its batch is that of README's plan"


@pytest.mark.full("slow")
def test_staged_training_goes_on_in_its_schedule(tmp_path: Path) -> None:
    base = [sys.executable, str(EXAMPLES / "staged_training.py"), "--checkpoints", str(tmp_path / "c")]
    whole = run(tmp_path, "run", "-np", "2", "--", *base)
    assert whole.returncode == 0, whole.stderr
    stages = re.findall(r"from step (\d+): (.*)", whole.stdout)
    assert stages == [
        ("0", "head, layers.0.0"),
        ("20", "head, layers.0.0, layers.1.0"),
        ("40", "head, layers.1.0, layers.2.0"),
    ]
    base[-1] = str(tmp_path / "parts")
    first = run(tmp_path, "run", "-np", "2", "--", *base, "--steps", "30")
    assert first.returncode == 0, first.stderr
    second = run(tmp_path, "run", "-np", "2", "--", *base, "--resume")
    assert second.returncode == 0, second.stderr
    assert re.findall(r"from step (\d+)", second.stdout) == ["30", "40"]
    assert last_loss(second.stdout) == last_loss(whole.stdout) < 1.1


@pytest.mark.full("slow")
def test_the_small_laboratory_trains_within_an_enforced_limit(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "small_laboratory.py"), "--limit-mb", "600", "--times", "2"]
    done = run(tmp_path, "run", "-np", "2", "--", *words, timeout=55)
    assert done.returncode == 0, done.stderr
    assert "2.0 times the 0.60 GB that each of 2 ranks may use" in done.stdout, done.stdout
    losses = [float(each) for each in re.findall(r"step \d: loss (\d\.\d+)", done.stdout)]
    assert len(losses) == 3, done.stdout
    assert losses[-1] < losses[0], f"losses {losses}"
    assert re.search(r"peak memory: 0\.\d+ GB", done.stdout), done.stdout
    # Without packing the weights it does not fit: the limit is real.
    full = run(tmp_path, "run", "-np", "2", "--", *words, "--times", "6", "--codec", "none", timeout=55)
    assert full.returncode == 1, full.stdout
    assert "allocate memory" in full.stderr, full.stderr


@pytest.mark.full("slow")
def test_checkpoints_go_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    words = [str(EXAMPLES / "checkpoints.py"), "--directory", str(tmp_path / "checkpoints")]
    killed = run(tmp_path, "run", "-np", "2", "--", sys.executable, *words, "--die-at", "25")
    assert killed.returncode == 137, killed.stderr
    result = run(tmp_path, "run", "-np", "3", "--", sys.executable, *words)
    assert result.returncode == 0, result.stderr
    assert re.search(r"begin at step (10|20) on 3 ranks", result.stdout), result.stdout
    assert last_loss(result.stdout.replace(" after 40 steps", "")) < 1.0


@pytest.mark.full("slow")
def test_a_torchrun_script_by_one_changed_word(tmp_path: Path) -> None:
    """Gloo is not run: one in ten of its processes aborts at exit."""
    name = str(EXAMPLES / "torchrun_ddp.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    changed = subprocess.run(
        [*torchrun, name, "farandole"], cwd=tmp_path, capture_output=True, text=True, timeout=55, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert changed.returncode == 0, changed.stderr
    same = run(tmp_path, "run", "-np", "2", "--backend", "farandole", "--", sys.executable, name)
    assert same.returncode == 0, same.stderr
    lines = [re.findall(r"backend (\w+), loss (\S+)", text)[0] for text in (changed.stdout, same.stdout)]
    assert [backend for backend, _ in lines] == ["farandole", "farandole"]
    assert lines[0][1] == lines[1][1]
    assert float(lines[0][1]) == pytest.approx(loss_of_one_process(), abs=2e-6)


def loss_of_one_process() -> float:
    """Train as that script does, on the joined batches of both ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = [torch.Generator().manual_seed(1 + rank) for rank in range(2)]
    for _ in range(40):
        inputs = torch.cat([torch.randn(32, 20, generator=draw) for draw in draws])
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.mark.full("slow")
def test_elastic_training_outlives_a_rank(tmp_path: Path) -> None:
    words = [str(EXAMPLES / "horovod_elastic.py"), "--epochs", "2", "--die-at", "12"]
    result = run(tmp_path, "run", "-np", "2", "--min-np", "1", "--", sys.executable, *words, timeout=55)
    assert result.returncode == 0, result.stderr
    assert "1 ranks, epoch 0, batch 10" in result.stdout, "from the last commit"
    assert last_loss(result.stdout) < 0.3


@pytest.mark.full("further")
def test_a_codec_of_ones_own(tmp_path: Path) -> None:
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, str(EXAMPLES / "own_codec.py"))
    assert result.returncode == 0, result.stderr
    match = re.search(r"loss (\d\.\d+) after 200 steps", result.stdout)
    assert match is not None
    assert float(match.group(1)) < 0.2


def test_the_codec_in_the_documentation_is_that_of_the_example() -> None:
    """Word for word."""
    code = re.findall(
        r"^def one_magnitude.*?(?=\n\n|```)", (ROOT / "docs" / "fast/slow-networks.md").read_text(), re.M | re.S
    )
    assert len(code) == 1
    assert code[0].strip() in (EXAMPLES / "own_codec.py").read_text()


def test_the_documentation_has_every_codec_and_option() -> None:
    page = (ROOT / "docs" / "fast/slow-networks.md").read_text()
    for name, options in OPTIONS.items():
        for word in (name, *options):
            assert f"`{word}" in page, word


def test_the_readmes_commands_are_those_of_the_makefile_and_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", readme, re.M):
        assert f"\n{target}:" in makefile
    assert "pip install -c constraints.txt -e ." in readme
    for command in re.findall(r"^(?:\.venv/bin/)?farandole (\w+)", readme, re.M):
        assert command in COMMANDS


def test_no_page_or_message_installs_farandole_from_an_index() -> None:
    """There is no such package on one."""
    wrong = re.compile(r"pip install (?:-+\S+ )*[\"']?farandole|[\"'`]farandole\[")
    files = [
        ROOT / "README.md",
        *(path for folder in ("docs", "examples", "src") for path in (ROOT / folder).rglob("*.*")),
    ]
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in files
        if path.suffix in (".md", ".py", ".toml", ".sh")
        for line in path.read_text(encoding="utf-8").splitlines()
        if wrong.search(line)
    ]
    assert not found, found


def test_the_readmes_first_screen_says_where_it_runs_and_what_is_not_there() -> None:
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:30])
    for word in ("Linux", "WSL2", "GPU", "NCCL", "not measured"):
        assert re.search(rf"\b{word}", screen.replace("\n", " ")), word


def test_make_says_what_it_does_while_it_installs(tmp_path: Path) -> None:
    for target, words in {"demo": "farandole demo", "test": "pytest"}.items():
        done = subprocess.run(
            ["make", "--no-print-directory", "-n", f"VENV={tmp_path / 'none'}", target],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert 'echo "1 of 2: making a virtual environment' in done
        assert "some hundred megabytes" in done
        assert all(
            "--progress-bar on" in line and " -q" not in line for line in done.splitlines() if " install " in line
        )
        assert words in done.splitlines()[-1]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page as GitHub makes them, with those that it names itself."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a name="([^"]+)">', text))


def test_links_of_the_documentation_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            other = page.parent / name if name else page
            assert other.exists(), f"{page.name} -> {target}"
            assert not anchor or anchor in anchors(other), f"{page.name} -> {target}"


def test_notes_that_are_cited_are_written_once() -> None:
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    # Where it is written a sentence follows; where it is cited, the end of one.
    written = Counter(re.findall(r"^(?:# )?\[Note: ([^\]]+)\] [A-Z]", text, re.M))
    cited = set(re.findall(r"\[Note: ([^\]]+)\]", text))
    assert {note: written[note] for note in cited if written[note] != 1} == {}, "how often each is written"


def test_tests_that_the_first_hour_names_exist() -> None:
    """Each number of the list has a row, and each row a test that is there, or a reason."""
    page = (ROOT / "docs" / "results" / "first-hour.md").read_text()
    rows = re.findall(r"^\| ([BWVCMP]\d+) \| [^|]+ \| ([^|]+) \|$", page, re.M)
    counts = {"B": 3, "W": 8, "V": 7, "C": 11, "M": 13, "P": 7}
    assert [name for name, _ in rows] == [f"{key}{i}" for key, n in counts.items() for i in range(1, n + 1)]
    for name, held_by in rows:
        tests = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", held_by)
        assert tests or held_by.startswith("no test: "), name
        for file, test in tests:
            text = (ROOT / "tests" / file).read_text()
            assert not test or f"def {test}(" in text, f"{name}: {file}::{test}"
