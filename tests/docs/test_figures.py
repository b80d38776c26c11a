"""Figures of README are those that were recorded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def test_the_table_beside_others_is_that_of_the_record() -> None:
    rows = json.loads((RESULTS / "beside-deepspeed.json").read_text())["contenders"]
    names = {
        "DDP": "ddp",
        "FSDP2": "fsdp2",
        "DeepSpeed ZeRO 1": "deepspeed 1",
        "DeepSpeed ZeRO 3": "deepspeed 3",
        "Farandole, exact": "farandole",
        "Farandole `zero=3`, exact": "farandole zero=3",
        "Farandole `zero=3`, int8 both ways": "farandole zero=3 int8 both ways",
        "Farandole `codec=int8`": "farandole int8",
    }
    shown = re.findall(
        r"^\| ([^|]+) \| ([\d.]+) s \| (\d+) MB \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.M
    )
    expected = [
        (
            name,
            f"{rows[row]['median_seconds']:.1f}",
            f"{rows[row]['sent_bytes'] / 1e6:.0f}",
            f"{rows[row]['loss']:.5f}",
        )
        for name, row in names.items()
    ]
    assert shown == expected


def test_the_chart_is_drawn_from_the_record(tmp_path: Path) -> None:
    drawn = tmp_path / "slow-links.svg"
    words = ["benchmarks/slow_links.py", "--draw", str(RESULTS / "slow-links.json"), str(drawn)]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=60)
    assert drawn.read_text() == (ROOT / "docs" / "slow-links.svg").read_text(), " ".join(words)
