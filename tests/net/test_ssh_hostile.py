"""Hostile texts on their way to a real rank over a real sshd: they arrive as they are, and nothing runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.hostile import HOSTILE_PIECES
from tests.net.cluster import cluster, why_impossible
from tests.ranks.test_launch import script

pytestmark = [pytest.mark.net, pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")]

TELL = """
import json, os, sys
told = {"words": sys.argv[1:], "directory": os.getcwd(), "python": sys.executable,
        "variables": [value for name, value in sorted(os.environ.items()) if name.startswith("HOSTILE_")]}
open(os.environ["ANSWER"], "w").write(json.dumps(told))
"""


@pytest.mark.timeout(120)
def test_hostile_texts_arrive_and_nothing_runs_them(tmp_path: Path) -> None:
    canary = tmp_path / "owned"
    texts = [piece.replace("CANARY", str(canary)) for piece in HOSTILE_PIECES if "\0" not in piece]
    assert len(texts) > 30
    place = tmp_path / "a 'b' \"c\" $(touch owned) `touch owned` ; touch owned \\ \u202e"
    place.mkdir()
    told = script(tmp_path, TELL)
    variables = [word for number, text in enumerate(texts) for word in ("-x", f"HOSTILE_{number:02}={text}")]
    with cluster(tmp_path, 2) as made:
        done = made.run(
            "run", "-H", "host1:1", *made.options, "--chdir", str(place),
            "--run-dir", str(place / "$(touch owned)"),
            "-x", f"ANSWER={tmp_path / 'answer'}", *variables,
            "--", sys.executable, "-S", told, *texts, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        for name in (f"-oProxyCommand=touch {canary}", f"$(touch {canary})", f"host1;touch {canary}"):
            refused = made.run("run", "-H", f"{name}:1", *made.options, "--", "true", cwd=tmp_path)
            assert refused.returncode == 2, refused.stderr
    answer = json.loads((tmp_path / "answer").read_text())
    assert answer["words"] == texts
    assert answer["variables"] == texts
    assert answer["directory"] == str(place)
    assert not list(tmp_path.rglob("owned*"))
