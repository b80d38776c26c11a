"""`farandole init`: which lines it proposes for scripts of varied shape, and what it refuses. Nothing is run."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from farandole.core.vocabulary.errors import ConfigError
from farandole.launch.adapt.propose import propose
from tests.unit.cli.test_cli import call
from tests.unit.launch.training_scripts import CAN, CANNOT, PLAIN

EXPECTED = {
    "plain": ["fd.init()", "loader = fd.shard(loader)", "model, optimizer = fd.distribute(model, optimizer)"],
    "windows_ends": [
        "fd.init()",
        "loader = fd.shard(loader)",
        "model, optimizer = fd.distribute(model, optimizer)",
    ],
    "functions": [
        "    train_loader = fd.shard(train_loader)",
        "    model, optimizer = fd.distribute(model, optimizer)",
        "    fd.init()",
    ],
    "trainer_class": [
        "        self.model, self.optimizer = fd.distribute(self.model, self.optimizer)",
        "        self.loader = fd.shard(self.loader)",
        "    fd.init()",
    ],
    "given_trainer": [
        "\tmodel, opt = fd.distribute(model, opt)",
        "\ttrain_dl = fd.shard(train_dl)",
        "\tfd.init()",
    ],
    "gan": [
        "fd.init()",
        "loader = fd.shard(loader)",
        "netD, optimizerD = fd.distribute(netD, optimizerD)",
        "netG, optimizerG = fd.distribute(netG, optimizerG)",
    ],
    "amp": [
        "farandole.init()",
        "model, optimizer = farandole.distribute(model, optimizer)",
        "train_loader = farandole.shard(train_loader)",
    ],
    "helpers": [
        "fd.init()",
        "    train_loader = fd.shard(train_loader)",
        "    net, optimizer = fd.distribute(net, optimizer)",
    ],
    "branches": [
        "    model, optimizer = fd.distribute(model, optimizer)",
        "    loader = fd.shard(loader)",
        "    fd.init()",
    ],
    "two_optimizers": [
        "fd.init()",
        "model, (opt_body, opt_head) = fd.distribute(model, [opt_body, opt_head])",
        "batches = fd.shard(batches)",
    ],
    "own_module": [
        "        fd.distribute(self, optimizer)",
        "    fd.init()",
        "    train_data = fd.shard(train_data)",
    ],
    "eval_first": ["fd.init()", "train = fd.shard(train)", "model, optim = fd.distribute(model, optim)"],
}


def written(tmp_path: Path, text: str, name: str = "train.py") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("name", CAN)
def test_the_lines_of_a_script(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, CAN[name])
    proposal = propose(path)
    added = [line[1:].rstrip("\r\n") for line in proposal.diff.splitlines() if re.match(r"\+(?!\+\+)", line)]
    removed = [line for line in proposal.diff.splitlines() if re.match(r"-(?!--)", line)]
    assert removed == []
    first, *lines = [line for line in added if line]
    assert first == ("import farandole" if name == "amp" else "import farandole as fd")
    assert lines == EXPECTED[name]
    assert path.read_bytes() == CAN[name].encode(), "nothing is written"


def test_the_model_is_moved_before_it_is_distributed(tmp_path: Path) -> None:
    lines = propose(written(tmp_path, CAN["amp"])).after.splitlines()
    at = lines.index("model, optimizer = farandole.distribute(model, optimizer)")
    assert lines[at - 1] == "model.to(device)"


def test_a_block_that_ends_on_a_branch_gets_its_line_after_it(tmp_path: Path) -> None:
    lines = propose(written(tmp_path, CAN["branches"])).after.splitlines()
    at = lines.index("    model, optimizer = fd.distribute(model, optimizer)")
    assert "no such optimizer" in lines[at - 1]


def test_windows_ends_stay(tmp_path: Path) -> None:
    after = propose(written(tmp_path, CAN["windows_ends"])).after
    assert after.count("\r\n") == after.count("\n")


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_changed_says_why(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, reason = CANNOT[name]
    written(tmp_path, text, "cannot.py")
    with pytest.raises(ConfigError, match=reason):
        propose(Path("cannot.py"))
    code, out, err = call("init", "cannot.py", "--write")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert (tmp_path / "cannot.py").read_text() == text


def test_the_diff_applies_and_equals_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("patched.py", "written.py"):
        written(tmp_path, PLAIN, name)
    code, diff, err = call("init", "patched.py")
    assert code == 0
    assert "nothing is written; to change patched.py: farandole init patched.py --write" in err
    subprocess.run(["patch", "-p0"], input=diff, text=True, check=True, capture_output=True)
    assert call("init", "written.py", "--write")[0] == 0
    assert Path("patched.py").read_text() == Path("written.py").read_text() == propose_text(tmp_path)
    assert call("init", "written.py")[2].startswith("farandole: written.py uses farandole already; check it: ")


def propose_text(tmp_path: Path) -> str:
    return propose(written(tmp_path, PLAIN, "again.py")).after


def test_mode_encoding_and_links_stay(tmp_path: Path) -> None:
    real = tmp_path / "real.py"
    real.write_bytes(("# -*- coding: latin-1 -*-\n" + PLAIN + "# \xe9\n").encode("latin-1"))
    real.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(real)
    code, out, _ = call("init", str(link), "--write", "--json")
    assert code == 0
    assert json.loads(out)["written"] is True
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o750
    assert real.read_bytes().endswith(b"# \xe9\n")
    assert b"fd.init()" in real.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "real.py"]


@pytest.mark.parametrize(
    ("module", "maker"),
    [
        ("diffusers.optimization", "get_cosine_schedule_with_warmup"),
        ("transformers.optimization", "get_scheduler"),
        ("timm.optim.schedules", "LinearWarmup"),
    ],
)
def test_a_schedule_is_no_optimizer(module: str, maker: str, tmp_path: Path) -> None:
    made = f"optim_schedule = {maker}(optimizer, 100)\n"
    text = f"from {module} import {maker}\n" + PLAIN.replace("for epoch", made + "for epoch", 1)
    after = propose(written(tmp_path, text)).after
    assert "model, optimizer = fd.distribute(model, optimizer)\n" in after


@pytest.mark.parametrize("maker", ["schedulefree.AdamWScheduleFree", "bitsandbytes.optim.Lion8bit"])
def test_optimizers_of_other_packages(maker: str, tmp_path: Path) -> None:
    module, _, name = maker.rpartition(".")
    text = f"from {module} import {name}\n" + PLAIN.replace("torch.optim.AdamW", name)
    assert "model, optimizer = fd.distribute(model, optimizer)\n" in propose(written(tmp_path, text)).after


def test_notes_name_what_ranks_share(tmp_path: Path) -> None:
    text = PLAIN + 'torch.save(model.state_dict(), "m.pt")\nmodel.to("cuda:0")\n'
    notes = "\n".join(propose(written(tmp_path, text)).notes)
    assert "every rank would write at line 18: put `if fd.world().rank == 0:` before" in notes
    assert "line 19 names one GPU" in notes


@pytest.mark.parametrize("words", [["no.py"], []])
def test_bad_lines(words: list[str]) -> None:
    code, out, err = call("init", *words)
    assert (code, out) == (2, "")
    assert "no.py: No such file" in err if words else "required: SCRIPT" in err
