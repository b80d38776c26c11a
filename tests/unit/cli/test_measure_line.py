"""`farandole measure` without a job: presets written, files compared, and lines that are refused at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.cli.main import run
from farandole.core.cluster_file import read_cluster, write_cluster
from farandole.core.cluster_presets import preset_cluster
from tests.unit.core.test_cluster_file import small_cluster


def test_a_preset_is_written_and_keeps_the_price_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "dgx.toml"
    write_cluster(small_cluster(price_per_rank_hour=2.5), out)
    assert run(["measure", "--preset", "dgx-a100", "-np", "16", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "preset" in said.out
    assert "measured" not in said.out.split(), "no figure claims to be measured"
    assert f"written to {out}" in said.err
    written = read_cluster(out)
    assert (written.ranks, written.price_per_rank_hour) == (16, 2.5)
    assert written.tiers == preset_cluster("dgx-a100", 16).tiers
    assert (
        run(["measure", "--preset", "dgx-a100", "-np", "16", "--name", "ours", "--json", "--out", str(out)]) == 0
    )
    assert json.loads(capsys.readouterr().out)["name"] == "ours"


def test_two_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.toml", tmp_path / "after.toml"
    write_cluster(preset_cluster("dgx-a100", 16), before)
    write_cluster(preset_cluster("a100+hdr-ib", 16), after)
    assert run(["measure", "--compare", str(before), str(after)]) == 0
    text = capsys.readouterr().out
    assert "tiers.network.collectives.all_reduce.bytes_per_second" in text
    assert "0.125x" in text, "one interface instead of eight"
    assert "disjoint" in text
    assert run(["measure", "--compare", str(before), str(after), "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    (rate,) = [each for each in changes if each["path"] == "tiers.network.collectives.send.bytes_per_second"]
    assert (rate["ratio"], rate["is_disjoint"]) == (0.125, True)
    assert rate["before"]["source"] == "preset"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "dgx-a10", "-np", "8"], "did you mean 'dgx-a100'"),
        (["--preset", "dgx-a100"], "without a number of ranks; add it: -np 16"),
        (["--preset", "dgx-a100", "-np", "12"], "12 ranks do not fill hosts of 8"),
        (["--preset", "cpu", "-np", "2", "--seconds", "4"], "--seconds has no effect with --preset"),
        (["--preset", "cpu", "-np", "2", "--include", "a"], "--include has no effect with --preset"),
        (["--compare", "a", "b", "--out", "x"], "--out has no effect with --compare"),
        (["--compare", "a", "b"], "there is no file a"),
        (["--seconds", "nan"], "--seconds nan: expected 1.5 to 3600"),
        (["--seconds", "1.4"], "--seconds 1.4: expected 1.5 to 3600"),
        (["--out", "/nowhere/x.toml"], "--out: cannot write /nowhere/x.toml"),
        (["--out", "x.json"], "--out x.json: a cluster is written as TOML"),
        (["--name", " "], "--name ' ': expected a name"),
    ],
)
def test_lines_that_are_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["measure", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing was written, and no job was started"
