"""`farandole top HOST:RUN` over real ssh: a run that only the other host has, once and live."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.cluster import FARANDOLE, PORT, Cluster, cluster, why_impossible
from tests.ranks.test_launch import script

pytestmark = [pytest.mark.net, pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")]

TRAIN = """
import torch, farandole as fd
world = fd.init()
model, optimizer = fd.distribute(model := torch.nn.Linear(4, 1), torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("top"), 2) as made:
        yield made


@pytest.fixture(scope="module")
def words(hosts: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a command about a run of host1; its python there writes down on which host it was asked."""
    place = tmp_path_factory.mktemp("a run")
    done = hosts.run(
        "run", "-np", "1", "--run-dir", "first run", "--", sys.executable, script(place, TRAIN), cwd=place, host=1
    )
    assert done.returncode == 0, done.stderr
    python = place / "python"
    python.write_text(f'#!/bin/sh\nuname -n >> {shlex.quote(str(place))}/asked\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    options = [word if word != "--ssh-option" else "-o" for word in hosts.options]
    ssh = shlex.join(["ssh", *options])
    assert f"-p {PORT}" in ssh
    return ["top", f"host1:{place / 'first run'}", "--python", str(python), "--ssh-command", ssh]


@pytest.mark.full("slow")
def test_the_state_of_a_run_of_another_host(hosts: Cluster, words: list[str], tmp_path: Path) -> None:
    done = hosts.run(*words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    state = json.loads(done.stdout)
    assert state["name"] == "first run"
    assert [rank["step"] for rank in state["ranks"]] == [5]
    place = Path(words[1].partition(":")[2]).parent
    assert set((place / "asked").read_text().split()) == {"host1"}


@pytest.mark.full("slow")
def test_it_is_drawn_on_a_terminal_until_the_run_is_over(hosts: Cluster, words: list[str], tmp_path: Path) -> None:
    terminal = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    command = [sys.executable, "-c", terminal, *FARANDOLE, *words, "--every", "0.2"]
    with hosts.popen(command, cwd=tmp_path, environment={"TERM": "xterm"}) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert "first run" in out
    assert "\x1b[?25h" in out, "the cursor is back"


@pytest.mark.full("slow")
def test_what_the_other_host_says_is_shown(hosts: Cluster, words: list[str], tmp_path: Path) -> None:
    done = hosts.run("top", "host1:/no/such/run", *words[2:], "--once", cwd=tmp_path)
    assert done.returncode == 2
    assert "/no/such/run" in done.stderr
    assert "Traceback" not in done.stderr
    lost = hosts.run("top", "host7:runs/first", *words[2:], "--once", cwd=tmp_path)
    assert lost.returncode == 255, "as ssh has it"
    assert "host7" in lost.stderr
