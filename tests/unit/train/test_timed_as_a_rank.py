"""Units are timed as a rank of the cluster runs them: on its device, with its threads, beside its neighbours."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farandole.core.cluster_presets import preset_cluster
from farandole.core.vocabulary.errors import ConfigError
from farandole.train.analysis.find_plan import as_a_rank_of
from farandole.train.analysis.measure import neighbours


def test_a_rank_of_a_measured_cluster_has_its_threads_and_neighbours() -> None:
    cluster = preset_cluster("4xcpu", 4)
    assert as_a_rank_of(cluster) == {"device": "cpu", "threads": None, "neighbours": 3}, "a preset says no threads"
    measured = replace(cluster, fingerprint={"backend": "gloo", "threads": "2"})
    assert as_a_rank_of(measured) == {"device": "cpu", "threads": 2, "neighbours": 3}, "a measured one does"


def test_a_model_of_gpus_is_not_timed_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = preset_cluster("dgx-a100", 8)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(
        ConfigError, match=r"ranks of the cluster compute on .*A100.*, and this machine has no GPU"
    ):
        as_a_rank_of(cluster)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert as_a_rank_of(cluster) == {"device": "cuda"}, "and on a GPU where there is one"


@pytest.mark.full("further")
def test_neighbours_compute_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    plain = subprocess.Popen

    def noted(*arguments: object, **named: object) -> object:
        started.append(plain(*arguments, **named))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    with neighbours(7, threads=2):
        assert len(started) == 1, "four cores have room for two ranks of two threads"
        before = _cpu_seconds(started[0].pid)
        while _cpu_seconds(started[0].pid) < before + 0.05:
            assert started[0].poll() is None, "it has ended"
    assert started[0].poll() is not None, "it goes on"


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
