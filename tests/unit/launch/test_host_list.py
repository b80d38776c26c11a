"""Lists of hosts: every notation, every slip with its line, and garbage that is never more than a ConfigError."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.vocabulary.errors import ConfigError
from farandole.launch.job.contract import JobSpec, RankSpec, rank_environment
from farandole.launch.job.hosts import (
    EmulatedHost,
    HostFinder,
    HostNamespaces,
    HostSlots,
    LocalHost,
    SshHost,
    need_ssh,
    parse_hostfile,
    parse_hosts,
    read_hostfile,
    rendezvous_address,
    select_hosts,
)
from farandole.launch.job.placement import assign_ranks

HOST_FILE = """\
# Horovod and DeepSpeed
node1 slots=4
node2 slots = 2   # two cards are broken

node3:3
node4 slots=2 max-slots=4 port=2222
node5
node5
[fe80::1]:2
::2 slots=1
node6 max_slots=1
"""


def test_hosts_in_every_notation() -> None:
    assert parse_hosts("a:2, b-1.example:4,[fe80::1]:1,a:3") == [
        HostSlots("a", 5), HostSlots("b-1.example", 4), HostSlots("fe80::1", 1)
    ]  # fmt: skip
    assert parse_hostfile(HOST_FILE, where="f") == [
        HostSlots("node1", 4), HostSlots("node2", 2), HostSlots("node3", 3), HostSlots("node4", 2, 2222),
        HostSlots("node5", 2), HostSlots("fe80::1", 2), HostSlots("::2", 1), HostSlots("node6", 1),
    ]  # fmt: skip
    assert parse_hostfile("a\nb slots=3", where="f", bare_slots=2) == [HostSlots("a", 2), HostSlots("b", 3)]


@pytest.mark.parametrize("text", ["", "a", "a:", ":2", "a:2,", "a:2:3", "-oX=x:2", "a b:2", "a:-1", "ä:1"])
def test_hosts_that_are_none_are_refused_in_horovods_words(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text)
    said = str(caught.value)
    assert said.startswith("Invalid host input, please make sure it has format as : worker-0:2,worker-1:2.") or (
        "expected a whole number from 1 to 4096" in said
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("node slots=0", "slots = '0': expected a whole number from 1 to 4096"),
        ("node slots=two", "slots = 'two': expected a whole number from 1 to 4096"),
        ("node slots=²", "slots = '²': expected a whole number from 1 to 4096"),
        ("node slots=" + "9" * 5000, "expected a whole number from 1 to 4096"),
        ("node port=70000", "port = '70000': expected a whole number from 1 to 65535"),
        ("node 4", "'4' after the host's name; expected a line such as: node1 slots=4"),
        ("node slot=4", "unknown key 'slot'; did you mean 'slots'?"),
        ("node:2 slots=2", "slots is given twice"),
        ("node slots=4 max-slots=2", "slots=4 is more than max-slots=2"),
        ("-node slots=2", "'-node' is no name of a host"),
        ("me@node1 slots=2", "write node1, and the user in ~/.ssh/config: Host node1 / User me"),
        ("[fe80::zz] slots=2", "'[fe80::zz]' is no IPv6 address"),
        ("first slots=1", "host first is on line 1 already; write each host once, with all its slots"),
        ("first", "host first is on line 1 already"),
    ],
)
def test_a_slip_is_named_with_its_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"first slots=2\n\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert problem in str(caught.value)


def test_a_file_without_hosts_or_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read host file"):
        read_hostfile(tmp_path / "missing")
    (tmp_path / "empty").write_text("# nobody\n\n")
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(tmp_path / "empty")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read host file"):
        read_hostfile(tmp_path / "bytes")


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,12}", fullmatch=True)
GARBAGE = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from([*"ab01:=,@#[]%-_. \t\n", "slots", "max-slots", "::1", "²"]), max_size=25).map(
        "".join
    ),
)


@given(GARBAGE)
def test_garbage_is_a_config_error_or_a_list(text: str) -> None:
    for parse in (
        parse_hosts,
        lambda text: parse_hostfile(text, where="f"),
        lambda text: select_hosts([HostSlots("a", 2)], include=text, exclude=None),
        lambda text: select_hosts([HostSlots("a", 2)], include=None, exclude=text),
    ):
        try:
            hosts = parse(text)
        except ConfigError:
            continue
        assert hosts
        assert all(1 <= host.slots <= 4096 and not host.name.startswith("-") for host in hosts)


@given(st.dictionaries(NAMES, st.integers(1, 4096), min_size=1, max_size=6))
def test_what_is_written_is_read_in_every_notation(hosts: dict[str, int]) -> None:
    expected = [HostSlots(name, slots) for name, slots in hosts.items()]
    assert parse_hosts(",".join(f"{name}:{slots}" for name, slots in hosts.items())) == expected
    for line in ("{}:{}", "{} slots={}", "  {}\tslots = {} # why"):
        text = "\n".join(line.format(name, slots) for name, slots in hosts.items())
        assert parse_hostfile(text, where="f") == expected


HOSTS = [HostSlots("a", 2), HostSlots("b", 4)]


def test_hosts_and_slots_are_chosen_as_in_deepspeed() -> None:
    def kept(include: str | None = None, exclude: str | None = None) -> list[HostSlots]:
        return select_hosts(HOSTS, include=include, exclude=exclude)

    assert kept() == HOSTS
    assert kept(include="b:0,2@a") == [HostSlots("a", 2), HostSlots("b", 2, chosen=(0, 2))]
    assert kept(exclude="a") == [HostSlots("b", 4)]
    assert kept(exclude="b:1@a:0") == [HostSlots("a", 1, chosen=(1,)), HostSlots("b", 3, chosen=(0, 2, 3))]
    assert kept(exclude="a:0,1") == [HostSlots("b", 4)]


@pytest.mark.parametrize(
    ("include", "exclude", "problem"),
    [
        ("a", "b", "--include and --exclude were both given"),
        ("c", None, "--include 'c': no host 'c' in the list; known: a, b"),
        ("b:4", None, "slot 4 of a host with 4; slots of b are 0 to 3"),
        ("a@a:1", None, "host a is named twice"),
        ("a:x", None, "slot = 'x': expected a whole number from 0"),
        (None, "a@b", "--exclude 'a@b' leaves no host; the list has a, b"),
    ],
)
def test_a_choice_that_makes_no_sense(include: str | None, exclude: str | None, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select_hosts(HOSTS, include=include, exclude=exclude)
    assert problem in str(caught.value)


def test_unequal_hosts_are_filled_in_order_and_cross_ranks_count_those_who_have_the_local_rank() -> None:
    seats = assign_ranks([HostSlots("a", 1), HostSlots("b", 3), HostSlots("c", 2), HostSlots("d", 9)], 6)
    assert [(seat.host_name, seat.local_rank, seat.local_size) for seat in seats] == [
        ("a", 0, 1), ("b", 0, 3), ("b", 1, 3), ("b", 2, 3), ("c", 0, 2), ("c", 1, 2),
    ]  # fmt: skip
    assert [(seat.cross_rank, seat.cross_size) for seat in seats] == [
        (0, 3),
        (1, 3),
        (0, 2),
        (0, 1),
        (2, 3),
        (1, 2),
    ]
    assert [(seat.node_rank, seat.node_count) for seat in seats] == [(0, 3), *[(1, 3)] * 3, *[(2, 3)] * 2]


def test_local_size_counts_ranks_not_slots_and_too_few_slots_are_refused() -> None:
    assert [seat.local_size for seat in assign_ranks([HostSlots("a", 4)], 2)] == [2, 2]
    with pytest.raises(ConfigError) as caught:
        assign_ranks(HOSTS, 7)
    assert caught.value.message == "Requested more processes (7) than there are available slots (6)"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_cross_ranks_number_the_ranks_of_one_local_rank(slots: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, sum(slots)))
    seats = assign_ranks([HostSlots(f"h{i}", each) for i, each in enumerate(slots)], size)
    assert [seat.rank for seat in seats] == list(range(size))
    for local_rank in {seat.local_rank for seat in seats}:
        circle = [seat for seat in seats if seat.local_rank == local_rank]
        assert [seat.cross_rank for seat in circle] == list(range(len(circle)))
        assert {seat.cross_size for seat in circle} == {len(circle)}


EMULATED = (HostNamespaces("host0", "10.9.0.1", 1, "eth0", 1), HostNamespaces("host1", "10.9.0.2", 1, "eth0", 1))


def test_this_machine_is_known_by_its_names() -> None:
    mine = socket.gethostname()
    for name in ("localhost", "127.0.0.1", "::1", mine, mine.upper(), mine.partition(".")[0]):
        assert HostFinder().find(HostSlots(name, 2)) == LocalHost(name, 2)
    for name in ("node-of-somebody-else", "192.0.2.7", "0.0.0.0", "2001:db8::7"):
        assert HostFinder().find(HostSlots(name, 2, 22)) == SshHost(name, 2, 22)


def test_hosts_are_here_or_emulated_or_need_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not need_ssh(HostFinder().find_all([]))
    assert not need_ssh(HostFinder().find_all([HostSlots("localhost", 1), HostSlots("127.0.0.1", 2)]))
    assert need_ssh(HostFinder().find_all([HostSlots("localhost", 1), HostSlots("far", 1)]))
    assert need_ssh(HostFinder(always_ssh=True).find_all([HostSlots("localhost", 1)]))
    finder = HostFinder(EMULATED, always_ssh=True)
    found = finder.find_all([HostSlots("host1", 1), HostSlots("10.9.0.1", 2)])
    assert rendezvous_address(found) == "10.9.0.2"
    assert found[0] == EmulatedHost("host1", 1, namespaces=EMULATED[1])
    assert found[1] == EmulatedHost("10.9.0.1", 2, namespaces=EMULATED[0])
    monkeypatch.setattr(socket, "gethostname", lambda: "host1")
    assert finder.find(HostSlots("localhost", 1)) == EmulatedHost("localhost", 1, namespaces=EMULATED[1])
    assert finder.own_address == "10.9.0.2"
    with pytest.raises(ConfigError, match="host2 is not one of the emulated hosts; they are host0, host1"):
        finder.find(HostSlots("host2", 1))


def test_a_rank_is_told_its_host_its_circle_and_its_devices() -> None:
    place = RankSpec(3, 4, 1, 2, 1, 2, host_name="b", cross_rank=0, cross_size=1, visible_devices=(0, 2))
    job = JobSpec("127.0.0.1", 1, Path("run"), environment={"HOROVOD_CYCLE_TIME": "2", "OMP_NUM_THREADS": "9"})
    told = rank_environment(place, job, {"CUDA_VISIBLE_DEVICES": "4,5,6"})
    assert (told["HOROVOD_CROSS_RANK"], told["HOROVOD_CROSS_SIZE"], told["HOROVOD_HOSTNAME"]) == ("0", "1", "b")
    assert (told["NODE_RANK"], told["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert told["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert (told["HOROVOD_CYCLE_TIME"], told["OMP_NUM_THREADS"], told["GLOO_SOCKET_IFNAME"]) == ("2", "9", "lo")
    assert rank_environment(place, job, {})["CUDA_VISIBLE_DEVICES"] == "0,2"
    with pytest.raises(ConfigError, match="slot 2 was chosen, but CUDA_VISIBLE_DEVICES=7 has 1"):
        rank_environment(place, job, {"CUDA_VISIBLE_DEVICES": "7"})
