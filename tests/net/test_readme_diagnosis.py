"""README's example of a diagnosis comes out as it is printed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.warm import run

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.net, pytest.mark.alone, pytest.mark.full("busy")]


@pytest.mark.timeout(200)
def test_the_example_names_what_the_readme_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(
        r"^(farandole emulate .*)\nfarandole diagnose \S+\n\n1\. \[(\S+)\] the link of rank (\d) \(host (\w+)\)",
        text,
        re.MULTILINE,
    )
    assert found, "README has another example"
    line, kind, rank, host = found.groups()
    words = shlex.split(line)[1:]
    end = words.index("--")
    script = [sys.executable, str(ROOT / words[end + 2]), *words[end + 3 :]]
    job = ["farandole", "run", "--run-dir", str(tmp_path / "run"), "--", *script]
    done = run(tmp_path, *words[: end + 1], *job, timeout=150)
    assert done.returncode == 0, done.stderr
    answer = run(tmp_path, "diagnose", str(tmp_path / "run"), "--json")
    first = json.loads(answer.stdout)["findings"][0]
    assert (first["kind"], first["ranks"], first["hosts"]) == (kind, [int(rank)], [host]), answer.stdout
    assert json.loads(answer.stdout)["bound"] == "communication"
    gain = first["fixes"][0]["gain"]["seconds"]
    assert 0.5 * first["seconds"] < gain <= first["seconds"]
