"""What `farandole emulate` reads before it makes anything: the script, the shape, the hosts of a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from farandole.core import env
from farandole.core.vocabulary.errors import ConfigError, LaunchError
from farandole.launch import namespaces as network
from farandole.launch.job.hosts import HostNamespaces, entering, read_namespaces, write_hosts
from farandole.launch.namespaces import (
    LinkChange,
    NamespaceHolder,
    Network,
    check_shape,
    describe_rate,
    parse_script,
)

HOSTS = [HostNamespaces("host0", "10.0.0.1", 2, "eth0", 11), HostNamespaces("host1", "10.0.0.2", 1, "eth0", 12)]


def test_a_script_is_read_in_order_of_time() -> None:
    text = " 60s:1=cut, 70s:host1=restore ,1m:25MB/s,30:100mbit,200ms:cut, "
    assert parse_script(text, 2) == [
        LinkChange(0.2, "cut"),
        LinkChange(30.0, "rate", None, 1e8),
        LinkChange(60.0, "cut", 1),
        LinkChange(60.0, "rate", None, 2e8),
        LinkChange(70.0, "restore", 1),
    ]


def test_a_script_may_be_empty() -> None:
    assert parse_script("", 2) == []
    assert parse_script(" , ", 2) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (LinkChange(1, "cut"), "all links: cut"),
        (LinkChange(1, "restore", 3), "the link of host3: restore"),
        (LinkChange(1, "rate", 0, 2e8), "the link of host0: 200 Mbit/s"),
        (LinkChange(1, "rate", None, 1e9), "all links: 1 Gbit/s"),
    ],
)
def test_a_change_is_said_in_a_line(change: LinkChange, text: str) -> None:
    assert change.to_text() == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("5s", "--script '5s': expected TIME:RATE"),
        ("5s:", "--script '5s:': expected TIME:RATE"),
        ("5s:1=", "--script '5s:1=': '' is not a rate"),
        ("5s:cutt", "--script '5s:cutt': 'cutt' is not a rate such as 200mbit or 1gbit; expected TIME:RATE"),
        ("5s:1bit", "--script '5s:1bit': '1bit' is not a rate between 8kbit and 400gbit"),
        ("soon:cut", "--script 'soon:cut': 'soon' is not a duration such as 30s or 5m"),
        ("-1s:cut", "--script '-1s:cut': '-1s' is not a duration"),
        (":cut", "--script ':cut': '' is not a duration"),
        ("5s:2=cut", "--script '5s:2=cut': there is no host '2', only 0 to 1"),
        ("5s:-1=cut", "there is no host '-1', only 0 to 1"),
        ("5s:=cut", "there is no host '', only 0 to 1"),
        ("5s:²=cut", "there is no host '²', only 0 to 1"),
        ("5s:0=1=cut", "there is no host '0=1', only 0 to 1"),
        ("1s:cut,oops,2s:restore", "--script 'oops': expected TIME:RATE"),
    ],
)
def test_a_wrong_script_says_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_script(text, 2)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((0, 1, {}), "--hosts 0: expected 1 to 200"),
        ((201, 1, {}), "--hosts 201: expected 1 to 200"),
        ((2, 0, {}), "--slots 0: expected 1 to 64"),
        ((2, 65, {}), "--slots 65: expected 1 to 64"),
        ((2, 1, {(1, 1): 1e6}), "--rate-between 1,1: expected two different hosts of 0 to 1"),
        ((2, 1, {(0, 1): 1e6, (0, 2): 1e6}), "--rate-between 0,2: expected two different hosts of 0 to 1"),
    ],
)
def test_a_shape_that_makes_no_sense(shape: tuple[int, int, dict[tuple[int, int], float]], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_shape(*shape)
    assert str(caught.value) == problem


def test_shapes_at_the_ends_of_the_range() -> None:
    check_shape(1, 1, {})
    check_shape(200, 64, {(0, 199): 1e6})


def test_a_link_that_is_not_shaped_says_so() -> None:
    assert describe_rate(None) == "not shaped"
    assert describe_rate(5e7) == "50 Mbit/s"


def test_hosts_that_are_written_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delenv(env.HOSTS_FILE, raising=False)
        assert read_namespaces() == []
        patch.setenv(env.HOSTS_FILE, str(tmp_path / "hosts.json"))
        write_hosts(tmp_path / "hosts.json", HOSTS)
        assert read_namespaces() == HOSTS


GOOD = {"name": "host0", "address": "10.0.0.1", "slots": 1, "interface": "eth0", "keeper": 11}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        (b"", "Expecting value"),
        (b"[{", "Expecting property name"),
        (b"\xff\xfe", "codec can't decode"),
        (b"null", "not iterable"),
        (b"[1]", "expected a host with name, address, slots, interface, keeper, got 1"),
        (b'{"name": "host0"}', "expected a host with name, address, slots, interface, keeper, got 'name'"),
        (json.dumps([{**GOOD, "color": 1}]).encode(), "expected a host with"),
        (json.dumps([{**GOOD, "slots": "2"}]).encode(), "slots: expected int, got '2'"),
        (json.dumps([{**GOOD, "keeper": True}]).encode(), "keeper: expected int, got True"),
        (json.dumps([{**GOOD, "name": None}]).encode(), "name: expected str, got None"),
    ],
)
def test_a_broken_file_of_hosts(
    content: bytes | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hosts.json"
    if content is not None:
        path.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setenv(env.HOSTS_FILE, str(path))
        with pytest.raises(ConfigError) as caught:
            read_namespaces()
    text = str(caught.value)
    assert text.startswith(f"FARANDOLE_HOSTS={path} cannot be read: "), text
    assert problem in text
    assert text.endswith("; it is set by farandole emulate")


def test_a_host_whose_keeper_is_gone_cannot_be_entered() -> None:
    with pytest.raises(LaunchError) as caught:
        entering(HostNamespaces("host7", "10.0.0.8", 1, "eth0", 1 << 30))
    assert str(caught.value) == "host host7 is gone; is farandole emulate still running?"


def made(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Network, list[str]]:
    """Return a network of two hosts, and the `tc` commands that made it; no process is started."""
    commands: list[str] = []

    def record(keeper: NamespaceHolder, command: list[str], standard_input: str = "") -> None:
        if command[0] == "tc":
            commands.append(f"{keeper.pid} {' '.join(command[1:])}")

    pids = iter(range(1, 100))
    monkeypatch.setattr(network, "_run", record)
    monkeypatch.setattr(network, "start_keeper", lambda name, hosts_file: NamespaceHolder(next(pids)))
    monkeypatch.setattr(NamespaceHolder, "end", lambda self: None)
    monkeypatch.setattr(network, "_check_tools", lambda: None)
    monkeypatch.setattr(network, "_sweep", lambda: None)
    net = Network(2, 1, options.pop("rate", None), **options)
    with net:
        pass
    net._keepers = [NamespaceHolder(pid) for pid in (1, 2, 3)]  # as while it lives: the switch, then the hosts
    return net, commands


def test_a_path_over_the_switch_has_the_latency_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, commands = made(monkeypatch, latency_seconds=0.01)
    delays = [line for line in commands if "netem" in line]
    assert len(delays) == 4
    assert all("root netem delay 5000us" in line for line in delays), delays


def test_a_direct_link_has_the_latency_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # What crosses a direct link leaves one shaped end, not two.
    _, commands = made(monkeypatch, latency_seconds=0.01, between={(0, 1): 1e6})
    delays = [line for line in commands if "netem" in line and " to" in line]
    assert len(delays) == 2
    assert all("parent 1:1 netem delay 10000us" in line for line in delays), delays


def test_a_change_of_rate_keeps_the_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    net, commands = made(monkeypatch, latency_seconds=0.01)
    commands.clear()
    net.set_rate(1e6, 1)
    assert [line.split(" dev ")[1].split()[0] for line in commands] == ["eth0", "eth0", "port1", "port1"]
    assert ["tbf" in line for line in commands] == [True, False, True, False]
    assert all("parent 1:1 netem delay 5000us" in line for line in commands[1::2]), commands


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "_path", lambda: str(tmp_path))
    for use in (lambda: Network(2, 1, None).__enter__(), network.has_delay):
        with pytest.raises(LaunchError) as caught:
            use()
        assert str(caught.value) == ("emulating hosts needs the command 'ip'; apt-get install iproute2 util-linux")


def test_files_of_the_dead_are_swept_and_those_of_the_living_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as dead:
        names = [f"farandole-hosts-{pid}-x" for pid in (os.getpid(), dead.pid)] + ["farandole-hosts-mine-x"]
        for name in names:
            (tmp_path / name).mkdir()
        network._sweep()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
        dead.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has reaped it
        network._sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[0], names[2]])
