"""A thousand hostile texts in every place of a line: what would be run is looked at, word by word."""

from __future__ import annotations

import re
import shlex
import struct
from pathlib import Path

import pytest

from farandole.core.framing import FrameError
from farandole.core.vocabulary.errors import ConfigError
from farandole.launch.job.hosts import HostSlots, parse_hostfile, parse_hosts
from farandole.launch.schedulers import mpi, slurm
from farandole.launch.schedulers.submission import SubmitSpec
from farandole.launch.ssh.agent import FileTaker
from farandole.launch.ssh.remote_shell import REMOTE_COMMAND, SshOptions, check_name, ssh_command
from farandole.launch.start.placing import forwarded_variables, host_commands, host_setup, place_job
from farandole.launch.start.request import JobRequest, RemoteOptions
from tests.hostile import hostile_texts

CORPUS = hostile_texts(1100)
SAFE = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*")


def test_the_corpus_is_large_and_hostile() -> None:
    assert len(set(CORPUS)) >= 1000
    assert sum("touch owned" in text for text in CORPUS) > 300
    assert sum(text.startswith("-") for text in CORPUS) > 50


@pytest.mark.parametrize("form", ["{}:1", "a:1,{}:1", "[{}]:1", "{}@node:1"])
def test_as_a_host_of_a_list(form: str) -> None:
    for text in CORPUS:
        try:
            hosts = parse_hosts(form.format(text))
        except ConfigError:
            continue
        assert all(SAFE.fullmatch(host.name) for host in hosts), text


@pytest.mark.parametrize("form", ["{} slots=1", "node {}", "node slots={}", "node port={}", "{}@node", "node{}:1"])
def test_as_a_word_of_a_host_file(form: str) -> None:
    for text in CORPUS:
        try:
            hosts = parse_hostfile(form.format(text), where="f")
        except ConfigError:
            continue
        assert all(SAFE.fullmatch(host.name) and type(host.slots) is int for host in hosts), text


@pytest.mark.parametrize("form", ["{}", "{}@node", "me@{}"])
def test_as_the_name_that_ssh_gets(form: str) -> None:
    for text in CORPUS:
        name = form.format(text)
        try:
            words = ssh_command(name, None, SshOptions())
        except ConfigError:
            continue
        assert words[-3:] == ["--", name, REMOTE_COMMAND]
        assert re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:%-]*", name), text
        assert check_name(name) == name


def test_nothing_but_the_name_of_the_host_gets_onto_a_command_line() -> None:
    """Directory, python, prelude, variables, words of the script: all of them come through the pipe."""
    hosts = [HostSlots("a", 1), HostSlots("b", 1)]
    plain = JobRequest(["python", "train.py"], hosts=hosts)
    wanted = host_commands(place_job(plain))
    assert [command[-3:] for _, _, command in wanted] == [["--", name, REMOTE_COMMAND] for name in "ab"]
    for text in CORPUS:
        options = RemoteOptions(
            python=text, directory=text, prelude=text, variables=(f"A={text}", text), ssh=SshOptions()
        )
        request = JobRequest(["python", "train.py", text], hosts=hosts, remote=options, environment={"B": text})
        found = host_commands(place_job(request))
        assert [command for _, _, command in found] == [command for _, _, command in wanted], text


def test_directory_and_python_are_a_line_each_of_what_the_remote_command_reads() -> None:
    taken = 0
    for text in filter(None, CORPUS):
        try:
            setup = host_setup(RemoteOptions(python=text, directory=text))
            lines = setup.preamble([text]).decode(errors="surrogateescape").split("\n")
        except ConfigError:
            assert re.search("[\n\r\0]", text) or text.startswith("-")
            continue
        assert lines[:3] == [text, text, ""]
        assert len(lines) == 6, "directory, python, prelude, code, paths"
        taken += 1
    assert taken > 400


def test_as_the_name_and_the_value_of_a_variable() -> None:
    for text in CORPUS:
        for word in (text, f"{text}=1"):
            try:
                chosen = forwarded_variables({}, [word])
            except ConfigError:
                continue
            assert all(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) for name in chosen), text
        if "\0" not in text:
            assert forwarded_variables({}, [f"NAME={text}"]) == {"NAME": text}


def test_as_the_name_of_a_file_that_a_host_sends(tmp_path: Path) -> None:
    inside = tmp_path / "run"
    inside.mkdir()
    for text in CORPUS:
        for name in (text, f"logs/{text}", f"{text}/log"):
            data = name.encode(errors="surrogateescape")
            try:
                FileTaker(inside, text, print).take(struct.pack("!H", len(data)) + data + b"x")
            except (FrameError, OSError):
                continue
            assert re.fullmatch(r"[A-Za-z0-9_./-]+", name), text
    assert {path.name for path in tmp_path.iterdir()} == {"run"}, "nothing beside the run directory"


def test_as_words_of_a_batch_script_and_of_mpirun() -> None:
    """What a shell will read is read back as the words that were given."""
    for text in CORPUS:
        command = ("python", "train.py", text)
        script = slurm.render(SubmitSpec(command, size=2, nodes=2, name=text))
        head, _, last = script.partition("exec ")
        assert shlex.split(last)[-3:] == list(command), text
        assert all(
            re.fullmatch(r"#SBATCH --[a-z-]+=[A-Za-z0-9_.-]+|#!/bin/bash", line) for line in head.splitlines()
        )
        for option in ("partition", "account", "qos", "time", "priority"):
            try:
                script = slurm.render(SubmitSpec(command[:2], size=2, nodes=2, options={option: text}))
            except ConfigError:
                continue
            assert re.fullmatch(r"[A-Za-z0-9_.,:+@%/=-]+", text), text
        assert shlex.split(mpi.render(SubmitSpec(command, size=2)))[-3:] == list(command), text
