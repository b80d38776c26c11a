"""codec = "auto" of Keras trainings on a slow link: a lossy codec for the large buckets, and the right model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.observe.records.run_reader import read_run
from tests.ranks.keras_jobs import MOST_SECONDS, needs_keras, needs_tensorflow, said_file, start_module

pytestmark = [pytest.mark.full("slow"), pytest.mark.net, needs_keras, pytest.mark.timeout(300)]


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=needs_tensorflow), "torch"])
def test_a_slow_link_gets_a_lossy_codec(backend: str, tmp_path: Path) -> None:
    prefix = ["-m", "farandole", "emulate", "--hosts", "2", "--rate", "20mbit", "--"]
    prefix += [
        "farandole",
        "run",
        "--set",
        "codec=auto",
        "--set",
        "lossy=true",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    prefix += ["--", sys.executable]
    job = start_module("tests.net.keras_auto_script", tmp_path, prefix=prefix, KERAS_BACKEND=backend)
    try:
        job.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    said = said_file(tmp_path).read_text()
    assert job.returncode == 0, said
    names = ["DistributedSGD.0", "tape"] if backend == "tensorflow" else ["DistributedSGD.0"]
    lines = re.findall(r"codec auto, (.*): int4 for 1 of 1 buckets \(predicted .*, uncompressed .*\)", said)
    assert lines == names, said
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["bits"] == ranks[1]["bits"]
    assert max(ranks[0]["errors"].values()) < 0.02, ranks[0]["errors"]
    for timeline in read_run(tmp_path / "run").timelines:
        codecs = [[bucket.codec for bucket in layout.buckets] for _, layout in timeline.layouts]
        assert codecs[:2] == [["none", "none"], ["none", "int4"]], codecs
