"""The parts of reaching hosts by ssh, without any: frames, names, the remote command, variables, interfaces."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.framing import HEADER, FrameError, pack_frame, read_json
from farandole.core.host.interfaces import Address, choose, own_addresses, towards
from farandole.core.vocabulary.errors import ConfigError, LaunchError
from farandole.launch.job.contract import JobSpec, RankSpec, rank_environment
from farandole.launch.ssh.agent import FileTaker, file_frames
from farandole.launch.ssh.frames import MAGIC, MOST_BYTES, Channel, read_output
from farandole.launch.ssh.host import RemoteJobSpec
from farandole.launch.ssh.host_failure import explain, explain_loss
from farandole.launch.ssh.protocol import differences, pack_job, pack_places, unpack_job, unpack_place
from farandole.launch.ssh.remote_shell import (
    REMOTE_COMMAND,
    HostSetup,
    SshOptions,
    check_name,
    ssh_command,
)
from farandole.launch.start.placing import forwarded_variables
from tests.hostile import hostile_texts

CORPUS = hostile_texts(1200)


def test_no_hostile_name_gets_to_ssh() -> None:
    accepted = []
    for text in CORPUS:
        try:
            words = ssh_command(text, None, SshOptions())
        except ConfigError:
            continue
        accepted.append(text)
        assert words[-3:] == ["--", text, REMOTE_COMMAND]
    for text in accepted:
        assert not text.startswith("-")
        assert all(character.isalnum() or character in "._-@:%" for character in text), text
    assert check_name("node-1.example.org") == "node-1.example.org"
    assert check_name("me@10.0.0.1") == "me@10.0.0.1"
    assert check_name("fe80::1%eth0") == "fe80::1%eth0"


def test_hostile_directories_pythons_and_variables_are_never_read_as_shell(tmp_path: Path) -> None:
    """A python that does not exist, in a directory that may: what the shell reads of the corpus is data."""
    (tmp_path / "bin").mkdir()
    argv = tmp_path / "bin" / "-python"
    tried = 0
    for text in CORPUS[::6]:
        try:
            setup = HostSetup(str(tmp_path / "bin" / text) if len(text) % 2 else str(tmp_path), text or "x")
        except ConfigError:
            continue
        done = subprocess.run(
            ["/bin/sh", "-c", REMOTE_COMMAND], input=setup.preamble([text]), capture_output=True, cwd=tmp_path,
            check=False, timeout=10,
        )  # fmt: skip
        assert done.returncode in (96, 126, 127), (text, done)
        tried += 1
    assert tried > 50
    assert not list(tmp_path.rglob("owned"))
    assert not argv.exists()


def test_the_remote_command_is_the_same_for_all_and_gets_its_words_as_they_are(tmp_path: Path) -> None:
    place = tmp_path / "a 'b' \"c\" $(d) `e` \\f"
    place.mkdir()
    python = place / "py $(x)"
    python.write_text('#!/bin/sh\nprintf \'%s|\' "$PWD" "$GREETING" "$1" "$2" "$3"\n')
    python.chmod(0o755)
    for prelude, greeting in (("", ""), ('GREETING="it\'s $((40 + 2))"; export GREETING; echo noise', "it's 42")):
        setup = HostSetup(str(place), str(python), prelude)
        done = subprocess.run(
            ["/bin/sh", "-c", REMOTE_COMMAND], input=setup.preamble([]), capture_output=True, text=False,
            check=True, env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        words = done.stdout.decode().split("|")
        assert words[:5] == [str(place), greeting, "-I", "-S", "-c"], "noise of the prelude goes to stderr"
    assert REMOTE_COMMAND.count("'") == 2, "every login shell reads it alike"
    assert "!" not in REMOTE_COMMAND, "csh would look into its history"


@pytest.mark.parametrize(
    ("directory", "python", "prelude"),
    [
        ("a\nb", "python", ""),
        ("", "python", ""),
        ("a", "-c", ""),
        ("a", "", ""),
        ("a", "p", "x\ny"),
        ("a", "p\0", ""),
    ],
)
def test_what_the_remote_command_cannot_take_is_refused(directory: str, python: str, prelude: str) -> None:
    with pytest.raises(ConfigError, match=r"--(chdir|python|prelude)"):
        HostSetup(directory, python, prelude)


def test_the_command_line_of_ssh() -> None:
    options = SshOptions(22, Path("key"), ("ProxyJump=door",))
    words = ssh_command("node1", 2222, options)
    assert words[0] == "ssh"
    assert words[words.index("-p") + 1] == "2222", "the host's own port wins"
    assert words.index("ProxyJump=door") < words.index("BatchMode=yes")
    assert ssh_command("n", None, SshOptions(command=("sh", "to-{host}"))) == ["sh", "to-n", REMOTE_COMMAND]


@pytest.mark.parametrize(
    ("code", "said", "says"),
    [
        (255, "ssh: Could not resolve hostname a: Name or service not known", "its name is not known here"),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "has changed",
        ),
        (255, "Host key verification failed.", "its host key is not known"),
        (255, "root@a: Permission denied (publickey).", "it refused our key"),
        (255, "ssh: connect to host a port 22: Connection refused", "no ssh server answers"),
        (255, "ssh: connect to host a port 22: No route to host", "it cannot be reached"),
        (96, "", "there is no directory /d"),
        (95, "x: not found", "the prelude failed: x: not found"),
        (94, "farandole cannot be imported by p: No module named 'farandole'", "cannot be imported by p"),
        (127, "p: not found", "it has no p"),
        (1, "Traceback\nValueError: odd", "ssh ended before anything was started: ValueError: odd"),
        (None, "", "nothing was said"),
    ],
)
def test_why_a_host_could_not_be_used(code: int | None, said: str, says: str) -> None:
    trouble = explain("a", code, said, HostSetup("/d", "p"))
    assert says in trouble.cause
    assert trouble.remedy


def test_why_a_connection_ended() -> None:
    assert "signal 9 (SIGKILL)" in explain_loss(-9, "").cause
    assert "supervisor was killed" in explain_loss(255, "").cause
    assert "connection was lost: client_loop: Broken pipe" in explain_loss(255, "client_loop: Broken pipe").cause


# -- frames ---------------------------------------------------------------------------------------


class Pipe:
    """A channel that reads what the test writes."""

    def __init__(self, *, expect_magic: bool = False) -> None:
        read_end, self.end = os.pipe()
        self.other = os.open(os.devnull, os.O_WRONLY)
        self.channel = Channel(read_end, self.other, expect_magic=expect_magic)

    def close(self) -> None:
        for descriptor in (self.channel.read_end, self.end, self.other):
            os.close(descriptor)


@given(st.binary(max_size=300))
def test_random_bytes_are_frames_or_an_error(data: bytes) -> None:
    pipe = Pipe()
    try:
        os.write(pipe.end, data)
        try:
            frames = pipe.channel.receive()
        except FrameError:
            return
        for kind, payload in frames:
            assert kind in (b"m", b"o", b"f", b"b")
            for read in (read_json, read_output):
                try:
                    read(payload)
                except FrameError:
                    continue
    finally:
        pipe.close()


@pytest.mark.parametrize("noise", [b"", b"Welcome!\n" * 20, MAGIC[:-2]])
def test_noise_of_the_shell_is_skipped(noise: bytes) -> None:
    pipe = Pipe(expect_magic=True)
    os.write(pipe.end, noise)
    assert pipe.channel.receive() == []
    os.write(pipe.end, MAGIC + pack_frame(ord("m"), b"{}", 2) + b"m")
    assert pipe.channel.receive() == [(b"m", b"{}")]
    pipe.close()


def test_a_frame_without_bound_is_refused_at_once() -> None:
    pipe = Pipe()
    os.write(pipe.end, HEADER.pack(ord("m"), MOST_BYTES + 1))
    with pytest.raises(FrameError, match="expected at most"):
        pipe.channel.receive()
    with pytest.raises(LaunchError, match="expected at most"):
        pipe.channel.send(b"m", bytes(MOST_BYTES + 1))
    pipe.close()


def test_a_sender_never_waits() -> None:
    read_end, write_end = os.pipe()
    sender, taker = Channel(read_end, write_end), Channel(os.dup(read_end), os.dup(write_end))
    for number in range(20):
        sender.send_output(number, False, bytes(100_000))
    assert sender.waiting_bytes > 1_000_000, "a pipe holds much less"
    got: list[int] = []
    while sender.waiting_bytes or len(got) < 20:
        got += [read_output(payload)[0] for _, payload in taker.receive()]
        sender.flush()
    assert got == list(range(20))
    for channel in (sender, taker):
        os.close(channel.read_end)
        os.close(channel.write_end)


# -- what travels ---------------------------------------------------------------------------------


def test_places_and_jobs_arrive_as_they_were() -> None:
    place = RankSpec(3, 4, 1, 2, 1, 2, host_name="b", cross_rank=1, cross_size=2, visible_devices=(0, 2))
    (packed,) = pack_places([place])
    there = unpack_place(packed, interface="eth7")
    assert there == RankSpec(**{**vars(place), "interface": "eth7"})
    job = JobSpec("10.0.0.1", 1234, Path("/here"), Path("/here/plan.toml"), 2, 1, 3, {"A": "b"})
    assert unpack_job(pack_job(job), Path("/there"), None) == JobSpec(
        "10.0.0.1", 1234, Path("/there"), None, 2, 1, 3, {"A": "b"}
    )
    told = rank_environment(there, job, {})
    assert told["GLOO_SOCKET_IFNAME"] == told["NCCL_SOCKET_IFNAME"] == "eth7"


def test_which_variables_travel() -> None:
    here = {
        "PATH": "/bin", "HOME": "/me", "AWS_SECRET": "s", "NCCL_DEBUG": "INFO", "PYTHONPATH": "/src", "RANK": "3",
        "GLOO_SOCKET_IFNAME": "mine", "FARANDOLE_HOSTS": "f", "FARANDOLE_NATIVE": "0",
    }  # fmt: skip
    assert forwarded_variables(here) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/src", "FARANDOLE_NATIVE": "0"}
    asked = forwarded_variables(here, ["AWS_SECRET", "B=x=y", "EMPTY=", "GLOO_SOCKET_IFNAME=eth9"])
    assert (asked["AWS_SECRET"], asked["B"], asked["EMPTY"], asked["GLOO_SOCKET_IFNAME"]) == (
        "s",
        "x=y",
        "",
        "eth9",
    )
    for text in ("NONE", "1A=x", "=x", "A B=x", "$(x)=1", "RANK=0", ""):
        with pytest.raises(ConfigError, match="-x"):
            forwarded_variables(here, [text])


def test_variables_of_tensorflow_and_keras_travel_and_those_of_terraform_do_not() -> None:
    of_tensorflow = {
        "KERAS_BACKEND": "jax", "KERAS_HOME": "/k", "TF_USE_LEGACY_KERAS": "1", "TF_NUM_INTRAOP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "2", "XLA_FLAGS": "--xla_dump_to=/d", "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    others = {
        "TF_CONFIG": '{"task": {"index": 1}}', "TF_VAR_password": "s", "TF_TOKEN_app_terraform_io": "s",
        "TF_HTTP_PASSWORD": "s", "TF_CLI_ARGS": "-var p=s", "KERAS": "x", "MY_TF_SECRET": "s",
    }  # fmt: skip
    assert forwarded_variables({**of_tensorflow, **others}) == of_tensorflow
    assert forwarded_variables(others, ["TF_VAR_password"]) == {"TF_VAR_password": "s"}, "asked for by name"


def test_files_travel_and_hostile_names_do_not(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "crashes").mkdir(parents=True)
    here.mkdir()
    big = os.urandom(700_000)
    (there / "events-rank1.jsonl").write_bytes(big)
    (there / "crashes" / "rank_1.json").write_text("{}")
    (there / "empty").touch()
    (there / "run.json").write_text("the launcher writes this one")
    (there / "link").symlink_to("/etc/passwd")
    (here / "empty").write_text("another host's")
    taker = FileTaker(here, "b", print)
    for payload in file_frames(there):
        taker.take(payload)
    assert (here / "events-rank1.jsonl").read_bytes() == big
    assert (here / "crashes" / "rank_1.json").read_text() == "{}"
    assert (here / "empty").read_text() == "another host's"
    assert (here / "hosts" / "b" / "empty").exists()
    assert {path.name for path in here.iterdir()} == {"events-rank1.jsonl", "crashes", "empty", "hosts"}
    for name in ("../up", "/etc/x", "a/../../b", ".hidden", "run.json", "a//b", "", "a\nb", "x" * 200):
        with pytest.raises(FrameError):
            taker.take(struct.pack("!H", len(name)) + name.encode() + b"data")
    assert not (tmp_path / "up").exists()


def test_files_of_a_host_that_the_disk_does_not_take_are_said_once_and_thrown_away(tmp_path: Path) -> None:
    (tmp_path / "events-rank1.jsonl").symlink_to("/dev/full")
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "b").write_text("in the way of a directory")
    said: list[str] = []
    taker = FileTaker(tmp_path, "b", said.append)
    for name in ("events-rank1.jsonl", "logs/rank_1.log", "events-rank1.jsonl"):
        taker.take(struct.pack("!H", len(name)) + name.encode() + b"data")
    assert len(said) == 1, said
    assert said[0].startswith("no more of host b's files are kept: ")
    with pytest.raises(FrameError):
        taker.take(struct.pack("!H", 4) + b"../x" + b"data")


def test_what_hosts_must_have_alike() -> None:
    here = {"torch": "2.13.0", "python": "3.11.2", "commit": "a" * 40}
    assert differences(here, {**here, "python": "3.11.9"}) == []
    assert differences(here, {"torch": "", "python": "3.11.2", "commit": ""}) == []
    found = differences(here, {"torch": "2.12.0", "python": "3.12.0", "commit": "b" * 40})
    assert [text.split(" is ")[0] for text in found] == ["torch", "python", "the commit of the working directory"]


# -- interfaces -----------------------------------------------------------------------------------

OWN = [
    Address("lo", "127.0.0.1", "127.0.0.0/8"),
    Address("docker0", "172.17.0.1", "172.17.0.0/16"),
    Address("eth0", "10.1.0.5", "10.1.0.0/16"),
    Address("ib0", "10.2.0.5", "10.2.0.0/16"),
]


@pytest.mark.parametrize(
    ("peers", "routed", "interface"),
    [
        (["10.2.0.6"], "10.2.0.5", "ib0"),  # the kernel's route is right
        (["172.17.0.9", "10.2.0.6"], "172.17.0.1", "ib0"),  # never a bridge of containers
        (["172.17.0.9"], "172.17.0.1", "eth0"),
        (["127.0.0.1"], "127.0.0.1", "lo"),  # all are this machine
        (["10.1.0.5"], "127.0.0.1", "lo"),
        (["192.0.2.1"], None, None),
    ],
)
def test_the_interface_that_leads_to_the_others(
    peers: list[str], routed: str | None, interface: str | None
) -> None:
    chosen = choose(peers, OWN, routed)
    assert (None if chosen is None else chosen.interface) == interface


def test_own_addresses() -> None:
    assert ("lo", "127.0.0.1", "127.0.0.0/8") in [(a.interface, a.address, a.network) for a in own_addresses()]
    assert towards(["127.0.0.1"]).interface == "lo"


def test_an_agent_starts_without_torch() -> None:
    code = "import sys, farandole.launch.ssh.agent; print([n for n in sys.argv[1:] if n in sys.modules])"
    words = [sys.executable, "-c", code, "torch", "numpy", "rich", "importlib.metadata"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plan_that_is_gone_before_a_host_starts_is_an_error(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    work = RemoteJobSpec(["true"], JobSpec("h", 1, tmp_path, plan), HostSetup("/", sys.executable), {})
    with pytest.raises(LaunchError, match=r"cannot read the plan of this job: .*plan\.toml"):
        work.start_message(work.job, (), 1)
    plan.write_text('codec = "int8"\n')
    assert work.start_message(work.job, (), 1)["plan"] == 'codec = "int8"\n'
