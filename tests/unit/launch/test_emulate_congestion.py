"""Which congestion control emulated hosts use, on machines that allow this and that (no namespace is made)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from farandole.bench.launch_ranks import Hosts
from farandole.core.vocabulary.errors import ConfigError, LaunchError
from farandole.launch import namespaces as network
from farandole.launch.namespaces import NamespaceHolder, choose


def machine(directory: Path, available: str, allowed: str | None) -> Path:
    """Return a directory with the kernel's lists, as /proc/sys/net/ipv4 has them."""
    (directory / "tcp_available_congestion_control").write_text(available + "\n")
    if allowed is not None:
        (directory / "tcp_allowed_congestion_control").write_text(allowed + "\n")
    return directory


@pytest.mark.parametrize(
    ("allowed", "used"),
    [
        ("reno cubic", "cubic"),
        ("bbr reno cubic", "cubic"),
        ("reno bbr", "reno"),
        ("bbr reno", "reno"),
        ("bbr dctcp", "dctcp"),
        ("bbr", ""),
        (None, ""),
    ],
)
def test_cubic_where_it_is_allowed_else_one_that_does_not_pace(
    tmp_path: Path, allowed: str | None, used: str
) -> None:
    # Available on all of them: a network namespace can have only what is allowed.
    name, note = choose(None, machine(tmp_path, "reno bbr cubic dctcp", allowed))
    assert name == used
    assert (note == "") is (used == "cubic")
    if note:
        assert f"uses {used or 'what this machine uses'}, not cubic" in note
        assert allowed is None or f"only {allowed} (net.ipv4.tcp_allowed" in note
        assert "\n" not in note


def test_one_that_is_asked_for_is_had_or_refused_with_the_list_that_matters(tmp_path: Path) -> None:
    settings = machine(tmp_path, "reno bbr cubic", "reno bbr")
    assert choose("bbr", settings) == ("bbr", "")
    with pytest.raises(ConfigError) as caught:
        choose("cubic", settings)
    assert str(caught.value) == (
        "--congestion-control 'cubic': this kernel has it, and allows network namespaces only reno, bbr; choose "
        "one of them, or allow it: sysctl -w net.ipv4.tcp_allowed_congestion_control='reno bbr cubic'"
    )
    with pytest.raises(ConfigError, match="'fast': expected one that this kernel has: reno, bbr, cubic; "):
        choose("fast", settings)


def test_a_benchmark_is_refused_it_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="'fast': expected one that this kernel has"):
        Hosts(2, 1, 1e9, "fast")
    with pytest.raises(ConfigError, match="'reno': nothing is emulated here"):
        Hosts(2, 1, None, "reno")


@pytest.mark.parametrize(
    ("command", "given", "said", "problem"),
    [
        (
            ["tee", "/proc/sys/net/ipv4/tcp_congestion_control"],
            "cubic",
            "tee: /proc/sys/net/ipv4/tcp_congestion_control: Operation not permitted\n",
            "`tee /proc/sys/net/ipv4/tcp_congestion_control`, given 'cubic', failed: "
            "tee: /proc/sys/net/ipv4/tcp_congestion_control: Operation not permitted",
        ),
        (
            ["ip", "-batch", "-"],
            "link set lo up\nlink add bridge type bridge\n",
            "Error: Unknown device type.\nCommand failed -:2\n",
            "`ip -batch -`, given 'link set lo up; link add bridge type bridge', failed: "
            "Error: Unknown device type.; Command failed -:2; this kernel lacks veth or bridge: "
            "modprobe -a veth bridge",
        ),
        (
            ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"],
            "",
            "Error: Specified qdisc kind is unknown.\n",
            "`tc qdisc replace dev eth0 root tbf` failed: Error: Specified qdisc kind is unknown.; "
            "this kernel lacks sch_tbf: modprobe sch_tbf",
        ),
        (["tc", "qdisc"], "", "", "`tc qdisc` failed: exit code 2"),
    ],
)
def test_an_error_names_the_command_and_blames_the_kernel_only_for_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, command: list[str], given: str, said: str, problem: str
) -> None:
    def fail(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert words[:2] == ["nsenter", "--net=/proc/7/ns/net"]
        return subprocess.CompletedProcess(words, 2, "", said)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(LaunchError) as caught:
        network._run(NamespaceHolder(7), command, given)
    assert str(caught.value) == f"an emulated host cannot be made: {problem}"
