"""The parts of the doctor: schedule, transfers over a real connection, names, facts, hosts that misbehave."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from farandole.core.vocabulary.errors import ConfigError
from farandole.launch.doctor import facts, link_probe, this_host
from farandole.launch.doctor.checks import judge
from farandole.launch.doctor.examine import (
    HostChannel,
    ProbeLost,
    Target,
    examine,
    find_targets,
    pair_rounds,
)
from farandole.launch.doctor.facts import Gpu
from farandole.launch.doctor.link_probe import Listener, call, rate_of
from farandole.launch.doctor.probe import Answers
from farandole.launch.job.hosts import HostFinder, HostSlots
from farandole.launch.ssh.remote_shell import HostSetup, SshOptions
from farandole.version import VERSION

TOKEN = bytes(range(16))


@pytest.mark.parametrize("count", range(9))
def test_every_pair_meets_once_and_nobody_is_in_two_places(count: int) -> None:
    hosts = [f"h{i}" for i in range(count)]
    rounds = pair_rounds(hosts)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == [(a, b) for i, a in enumerate(hosts) for b in hosts[i + 1 :]]
    for each in rounds:
        busy = [name for pair in each for name in pair]
        assert len(busy) == len(set(busy))
    assert len(rounds) <= max(count, 1)


def test_a_rate_is_that_of_all_or_of_what_came_after_the_first_quarter() -> None:
    # A burst of 300 at once, then 100 a second.
    samples = [(0.0, 300), (1.0, 400), (2.0, 500), (9.0, 1200)]
    assert rate_of(0.0, samples) == pytest.approx(8 * 900 / 9)
    # A receiver that was held up for 9 s, and then found full buffers.
    assert rate_of(0.0, [(9.0, 300), (9.5, 600), (10.0, 1000)]) == pytest.approx(8 * 100)
    assert rate_of(0.0, []) == 0.0
    assert rate_of(0.0, [(1.0, 1000)]) == 0.0
    assert rate_of(0.0, [(1.0, 500), (1.0, 1000)]) == 0.0


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1", TOKEN)
    yield made
    made.close()


def test_a_call_measures_both_ways(listener: Listener) -> None:
    found = call("127.0.0.1", listener.port, TOKEN, 0.05)
    assert 0 < found["round_trip_seconds"] < 0.1
    assert found["bits_per_second"] > 1e6
    assert found["bits_per_second_back"] > 1e6
    assert found["stalled"] is False


def test_a_call_that_only_wants_to_get_through_sends_nothing_large(listener: Listener) -> None:
    assert set(call("127.0.0.1", listener.port, TOKEN, None)) == {"round_trip_seconds"}


def test_a_stranger_learns_nothing(listener: Listener) -> None:
    assert call("127.0.0.1", listener.port, bytes(16), 0.05) == {"problem": "reset"}


def test_a_closed_port_is_refused(listener: Listener) -> None:
    listener.close()
    assert call("127.0.0.1", listener.port, TOKEN, None) == {"problem": "refused"}


def test_large_messages_that_vanish_are_a_stall(monkeypatch: pytest.MonkeyPatch, listener: Listener) -> None:
    monkeypatch.setattr(link_probe, "STALL_SECONDS", 0.3)

    def hears_nothing(_: socket.socket) -> link_probe.Seen:
        time.sleep(0.5)
        return link_probe.Seen(0, 0.0)

    monkeypatch.setattr(link_probe, "receive", hears_nothing)
    found = call("127.0.0.1", listener.port, TOKEN, 0.05)
    assert found["stalled"] is True
    assert "bits_per_second" not in found


def test_a_name_server_that_does_not_answer_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()

    def look_up(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name == "slow":
            hanging.wait(5)
        if name == "unknown":
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    begin = time.monotonic()
    found = this_host.look_up(["known", "unknown", "slow"], seconds=0.2)
    hanging.set()
    assert found == {"known": ["10.0.0.1"], "unknown": [], "slow": None}
    assert time.monotonic() - begin < 1.0


def test_memory_is_that_of_the_control_group_where_it_has_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory(text: str) -> dict[str, int | None]:
        monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path))
        (tmp_path / "meminfo").write_text(text)
        return facts.read_memory(tmp_path)

    others = "".join(f"{name}: 1 kB\n" for name in ["MemFree", "Buffers", "Cached", "Shmem", "Active", "Inactive"])
    found = f"MemTotal: 1000 kB\nMemAvailable: 800 kB\n{others}"
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("0\n")
    assert memory(found) == {"memory_bytes": 1_024_000, "memory_available_bytes": 819_200}
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("100000\n")
    assert memory(found) == {"memory_bytes": 500_000, "memory_available_bytes": 400_000}
    assert memory("MemTotal:") == {"memory_bytes": None, "memory_available_bytes": None}


LINKS: list[dict[str, object]] = [
    {"ifname": "eth0"}, {"ifname": "eth1", "linkinfo": {"info_kind": "veth"}}, {},
    {"ifname": "ib0", "linkinfo": {"info_kind": "ipoib"}}, {"ifname": "mine", "linkinfo": {"info_kind": "bridge"}},
]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "speeds", "bridges"),
    [
        (json.dumps(LINKS), {"eth0": 10_000, "ib0": 10_000}, {"mine"}),
        (None, {}, set()),
        ("Usage: ip [ OPTIONS ]", {}, set()),
    ],
)
def test_speed_is_that_of_cards_and_only_ip_knows_them(
    monkeypatch: pytest.MonkeyPatch, said: str | None, speeds: dict[str, int], bridges: set[str]
) -> None:
    names = ["eth0", "eth1", "ib0", "mine", "gone"]
    state = psutil._ntuples.snicstats(True, psutil.NIC_DUPLEX_FULL, 10_000, 1500, "up,running")
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names)))
    monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(names[:4], state))
    monkeypatch.setattr(this_host, "ask_command", lambda *_: said)
    found = {each.name: each for each in this_host.read_interfaces()}
    assert {name: each.speed_megabits for name, each in found.items() if each.speed_megabits} == speeds
    assert {name for name, each in found.items() if each.duplex == "full"} == set(speeds)
    assert {name for name, each in found.items() if each.is_virtual} == bridges
    assert {(each.is_up, each.mtu_bytes) for each in found.values()} == {(True, 1500), (None, None)}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu.max": "what\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_cores(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert facts.read_cores(tmp_path)["core_quota"] == quota


def test_gpus_of_the_command() -> None:
    text = "NVIDIA H100 80GB HBM3, 81559, 4, 570.1\nOdd, name, [N/A], [N/A], 570.1\nno GPU\n"
    assert facts.parse_nvidia_smi(text) == (
        Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20, 4 * 2**20, "570.1"),
        Gpu("Odd, name", None, None, "570.1"),
    )


def test_shared_memory_that_is_not_there_has_no_bytes(tmp_path: Path) -> None:
    assert facts.read_shared_memory(str(tmp_path / "none"))["shared_memory_bytes"] == 0
    assert facts.read_shared_memory(str(tmp_path))["shared_memory_bytes"] > 0


@pytest.mark.parametrize(
    "question", [{"type": "what"}, {"type": "call"}, {"type": "listen", "address": "127.0.0.1", "token": "0"},
                 {"type": "listen", "address": "256.0.0.1", "token": "00" * 16}, {"type": "peers", "peers": 3}],
)  # fmt: skip
def test_a_question_that_makes_no_sense_is_answered(question: dict[str, object]) -> None:
    assert Answers().to(question)["type"] == "failed"


# -- hosts that misbehave ---------------------------------------------------------------------------


def target(code: str, name: str = "odd") -> Target:
    return Target(name, "", [sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import sys; sys.stderr.write('No module named farandole'); sys.exit(1)", "No module named farandole"),
        ("", "it said nothing"),
        ("import sys; sys.stdout.write('x' * 100_000); sys.stdout.flush(); input()", "no answer of ours"),
        ("from farandole.launch.ssh.frames import MAGIC as m; import os; "
         "os.write(1, m + b'm' + bytes([255] * 15)); input()",
         "no answer of ours"),
    ],
)  # fmt: skip
def test_a_host_that_misbehaves_is_unreachable_and_says_why(code: str, cause: str) -> None:
    facts = examine([target(code)])
    assert facts.hosts == ()
    assert cause in facts.unreachable[0].cause
    assert facts.unreachable[0].remedy


SENDS = """
from farandole.launch.doctor import probe
real = probe.Answers._answer
changed = {%s}
probe.Answers._answer = lambda self, asked: {**real(self, asked), **(changed if asked["type"] == "facts" else {})}
probe.main()
"""


@pytest.mark.parametrize(
    "text", ["$(touch /tmp/x)", "`id`", "a;id", "a|id", "a\nid", "'; id; '", "\x1b[2J", "a>b"]
)
def test_what_a_host_says_is_no_part_of_a_shells_line_nor_a_terminals(text: str) -> None:
    facts = examine([target(SENDS % f"'farandole': {text!r}, 'executable': {text!r}", "a")])
    (finding,) = judge(facts)
    assert text not in finding.what + finding.fix
    assert (finding.what + finding.fix).isprintable()


def test_a_host_of_another_version_is_asked_no_more() -> None:
    good = "from farandole.launch.doctor.probe import main; main()"
    older = "'farandole': '0.0.1', 'executable': '/opt/my venv/bin/python', 'facts': 3"
    facts = examine([target(SENDS % older, "a"), target(good, "b")])
    assert [each.farandole for each in facts.hosts] == [VERSION]
    (finding,) = [each for each in judge(facts) if each.host == "a"]
    assert finding.what == f"a: it has farandole 0.0.1, here is {VERSION}"
    assert finding.fix.startswith("install the same version there: copy /")
    assert finding.fix.endswith("'/opt/my venv/bin/python' -m pip install -e COPY")


def test_facts_that_are_none_are_a_lost_host() -> None:
    facts = examine([target(SENDS % "'facts': {'hostname': 3}", "a")])
    assert facts.hosts == ()
    assert "its facts cannot be read" in facts.unreachable[0].cause


def test_a_command_that_does_not_exist() -> None:
    facts = examine([Target("odd", "", ["/no/such/shell"])])
    assert "cannot start '/no/such/shell'" in facts.unreachable[0].cause


def ask(channel: HostChannel, what: str, seconds: float) -> Any:
    channel.send({"type": what})
    return channel.receive(time.monotonic() + seconds)


def test_a_host_that_never_answers_is_given_up() -> None:
    channel = HostChannel(target("import time; time.sleep(60)"))
    begin = time.monotonic()
    with pytest.raises(ProbeLost, match="it does not answer"):
        ask(channel, "facts", 0.3)
    channel.close()
    assert time.monotonic() - begin < 5


def test_a_probe_leaves_by_itself_when_its_pipe_ends(tmp_path: Path) -> None:
    left = tmp_path / "left"
    line = f"{sys.executable} -m farandole.launch.doctor.probe; echo $? > {left}"
    channel = HostChannel(Target("here", "", ["/bin/sh", "-c", line]))
    assert ask(channel, "clock", 20.0)["type"] == "answer"
    channel.close()
    assert left.read_text() == "0\n", "it was killed"


def test_a_shell_that_writes_much_to_stderr_is_read_at_once() -> None:
    code = (
        "import sys; sys.stderr.write('x' * 400_000); sys.stderr.flush(); "
        "from farandole.launch.doctor.probe import main; main()"
    )
    channel = HostChannel(target(code))
    begin = time.monotonic()
    assert ask(channel, "clock", 20.0)["type"] == "answer"
    assert time.monotonic() - begin < 4.0, "a pipe's 64 KiB a second"
    channel.close()


def test_what_a_shell_prints_first_is_no_answer() -> None:
    code = "print('welcome to this host', flush=True); from farandole.launch.doctor.probe import main; main()"
    facts = examine([target(code)])
    assert [host.python for host in facts.hosts] == [".".join(map(str, sys.version_info[:3]))]
    assert facts.unreachable == ()


def test_a_host_that_is_lost_does_not_stop_the_others() -> None:
    good = "from farandole.launch.doctor.probe import main; main()"
    facts = examine([target(good, "a"), target("", "b")])
    assert [host.name for host in facts.hosts] == ["a"]
    assert [lost.name for lost in facts.unreachable] == ["b"]
    assert facts.links == ()


# -- which hosts ---------------------------------------------------------------------------------


SETUP = HostSetup("/srv/job", "/usr/bin/python3")


def test_this_machine_by_all_its_names_is_one_host() -> None:
    found = find_targets([HostSlots("localhost", 1), HostSlots("127.0.0.1", 1)], HostFinder(), SshOptions(), SETUP)
    assert [each.name for each in found] == [socket.gethostname()]
    assert find_targets([], HostFinder(), SshOptions(), SETUP)[0].command[0] == sys.executable


def test_other_hosts_are_reached_by_ssh_and_this_one_is_not() -> None:
    hosts = [HostSlots("localhost", 1), HostSlots("node7", 4, port=2222)]
    here, there = find_targets(hosts, HostFinder(), SshOptions(), SETUP)
    assert here.command[0] == sys.executable
    assert there.command[0] == "ssh"
    assert {"2222", "node7", "BatchMode=yes"} <= set(there.command)
    assert there.setup is SETUP
    assert here.setup is None


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no name of a host"):
        find_targets([HostSlots("-oProxyCommand=x", 1)], HostFinder(), SshOptions(), SETUP)


def test_over_the_same_remote_command_as_a_job() -> None:
    """What ssh would run on the host, by a shell here."""
    shell = SshOptions(command=("env", "HOST={host}", "sh", "-c"))
    setup = HostSetup(str(Path.cwd()), sys.executable)
    facts = examine(
        find_targets([HostSlots("node1", 1), HostSlots("node2", 1)], HostFinder(always_ssh=True), shell, setup)
    )
    assert [host.name for host in facts.hosts] == ["node1", "node2"]
    assert all(host.torch for host in facts.hosts)
    assert facts.unreachable == ()
    missing = HostSetup("/no/such/directory", sys.executable)
    nowhere = find_targets([HostSlots("node1", 1)], HostFinder(always_ssh=True), shell, missing)
    facts = examine(nowhere)
    assert facts.unreachable[0].cause == "there is no directory /no/such/directory"
