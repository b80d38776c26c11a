"""Making, keeping and refusing the library of native loops: whatever the host has, training goes on."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from farandole.comm.codecs.registry import make_codec
from farandole.comm.native import build
from farandole.comm.native.build import Unusable, load_library
from farandole.core.env import native_loops_are_wanted, read_cache_directory
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.core.vocabulary.errors import ConfigError
from tests.native import needs_compiler

SOURCE = Path(build.__file__).with_name("kernels.c")
SMALL = '__attribute__((visibility("default"))) int answer(void) { return %d; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small C file, and an empty cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "small.c"
    path.write_text(SMALL % 42)
    return path


@pytest.fixture
def unloaded() -> Iterator[None]:
    build._load.cache_clear()
    yield
    build._load.cache_clear()


def compiler(directory: Path, text: str) -> str:
    """Put a `cc` that runs `text` into a directory of its own; return the PATH with it alone."""
    directory.mkdir()
    script = directory / "cc"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return str(directory)


def logged(tmp_path: Path) -> tuple[str, Path]:
    """Return the PATH of a compiler that counts its calls, and the file with a line for each."""
    real, log = shutil.which("cc"), tmp_path / "calls"
    assert real is not None, "these tests need a C compiler"
    path, quoted = shlex.quote(os.environ["PATH"]), shlex.quote(str(log))
    return compiler(tmp_path / "bin", f'echo call >> {quoted}\nPATH={path} exec {real} "$@"'), log


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/farandole/native").iterdir())


@needs_compiler
def test_it_is_made_once_and_kept_for_this_user_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = logged(tmp_path)
    monkeypatch.setenv("PATH", path)
    for _ in range(2):
        assert load_library(source).answer() == 42
    assert log.read_text() == "call\n"
    (library,) = kept(tmp_path)
    assert library.parent.stat().st_mode & 0o777 == 0o700
    source.write_text(SMALL % 43)
    assert load_library(source).answer() == 43, "another source is another library"
    assert len(kept(tmp_path)) == 2


@pytest.mark.gate_cases("short")
@needs_compiler
@pytest.mark.parametrize("damage", ["short", "changed", "empty"])
def test_a_damaged_library_is_made_again(
    damage: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = logged(tmp_path)
    monkeypatch.setenv("PATH", path)
    command = [
        sys.executable,
        "-c",
        f"from {build.__name__} import *; print(load_library(Path({str(source)!r})).answer())",
    ]
    assert subprocess.check_output(command, text=True) == "42\n"
    (library,) = kept(tmp_path)
    whole = library.read_bytes()
    library.write_bytes({"short": whole[:5000], "changed": whole[:-1] + b"x", "empty": b""}[damage])
    assert subprocess.check_output(command, text=True) == "42\n"
    assert log.read_text() == "call\n" * 2
    assert [path.read_bytes() for path in kept(tmp_path)] == [whole]


@needs_compiler
def test_several_processes_at_once(source: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        f"from {build.__name__} import *; print(load_library(Path({str(source)!r})).answer())",
    ]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=50)[0] for process in started] == ["42\n"] * 3
    assert all(process.returncode == 0 for process in started)
    assert [path.suffix for path in kept(tmp_path)] == [".so"], "nothing half made is left"


@needs_compiler
def test_a_directory_that_others_may_write_to_is_not_used(source: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cache/farandole/native"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    assert load_library(source).answer() == 42
    assert kept(tmp_path) == []


@needs_compiler
@pytest.mark.parametrize("place", ["cache", "cache/farandole"])
@pytest.mark.parametrize("whose", ["everybody's", "a stranger's"])
def test_a_directory_below_one_that_others_can_change_is_not_used(
    whose: str, place: str, source: Path, tmp_path: Path
) -> None:
    """Its owner could put another one in its place, after we have looked and before we load."""
    directory = tmp_path / "cache/farandole/native"
    directory.mkdir(parents=True, mode=0o700)
    if whose == "everybody's":
        (tmp_path / place).chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(tmp_path / place, 12345, 12345)
    else:
        pytest.skip("only root can give a directory away")
    assert load_library(source).answer() == 42
    assert kept(tmp_path) == []


@needs_compiler
def test_below_a_sticky_directory_nobody_can_put_another_in_place(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    assert load_library(source).answer() == 42
    assert len(kept(tmp_path)) == 1


@needs_compiler
def test_directories_are_made_for_this_user_alone_whatever_the_umask(source: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert load_library(source).answer() == 42
    finally:
        os.umask(before)
    assert len(kept(tmp_path)) == 1
    for place in ("cache", "cache/farandole", "cache/farandole/native"):
        assert (tmp_path / place).stat().st_mode & 0o777 == 0o700


@needs_compiler
@pytest.mark.parametrize("home", ["a file", "none"])
def test_without_a_home_to_write_to_it_is_made_for_this_process(
    home: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home == "a file":  # where nobody, root neither, can make a directory
        (tmp_path / "cache").write_text("")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        assert read_cache_directory() is None
    aside = tmp_path / "aside"
    aside.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(aside))
    assert load_library(source).answer() == 42
    assert list(aside.iterdir()) == []


def test_no_compiler(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("", str(tmp_path)):
        monkeypatch.setenv("PATH", path)
        with pytest.raises(Unusable, match="no cc, gcc, clang on the PATH"):
            load_library(source)


def test_a_compiler_that_fails(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", "echo no licence >&2; exit 3"))
    with pytest.raises(Unusable, match="cc ended with 3: no licence"):
        load_library(source)
    assert kept(tmp_path) == []


def test_a_compiler_that_makes_no_library(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'while [ "$1" != -o ]; do shift; done; echo nothing > "$2"'
    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", text))
    with pytest.raises(Unusable, match=r"small\.c: .*\.so"):
        load_library(source)


def test_a_compiler_that_hangs_is_ended_with_its_children(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = tmp_path / "children"
    sleep = shutil.which("sleep")
    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", f"{sleep} 600 &\necho $! > '{children}'\nwait"))
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.5)
    begin = time.monotonic()
    with pytest.raises(Unusable, match=r"did not end in 0\.5 s"):
        load_library(source)
    assert time.monotonic() - begin < 10
    child = int(children.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the compiler's child still runs"
        time.sleep(0.01)


def test_codecs_go_on_without_a_compiler_and_say_so_once(
    unloaded: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.DEBUG, "farandole"):
        for name in ("int8", "bf16"):
            assert make_codec(CodecSpec.parse(name)).native is None
    assert [record.getMessage() for record in caplog.records] == ["no native loops: no cc, gcc, clang on the PATH"]


@needs_compiler
def test_a_library_without_the_functions_is_not_used(
    unloaded: None, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "load_library", lambda path: load_library(source))
    with caplog.at_level(logging.DEBUG, "farandole"):
        assert build.loops() is None
    assert "farandole_encode_int8" in caplog.text


@needs_compiler
def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.loops() is not None
    monkeypatch.setenv("FARANDOLE_NATIVE", "0")
    assert build.loops() is None
    assert make_codec(CodecSpec.parse("int8")).native is None
    assert native_loops_are_wanted({"FARANDOLE_NATIVE": "1"})
    with pytest.raises(ConfigError, match="FARANDOLE_NATIVE='off': expected 0 or 1"):
        native_loops_are_wanted({"FARANDOLE_NATIVE": "off"})


def test_where_caches_lie() -> None:
    assert read_cache_directory({"XDG_CACHE_HOME": "/caches", "HOME": "/home/me"}) == "/caches"
    assert read_cache_directory({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}) == "/home/me/.cache"
    assert read_cache_directory({"HOME": ""}) is None


@needs_compiler
@pytest.mark.parametrize("flags", [["-O0"], ["-DCLONES=", "-O2"], ["-ffast-math"]])
def test_the_source_compiles_without_a_warning(flags: list[str], tmp_path: Path) -> None:
    """Plainly too; and not at all where arithmetic would be another."""
    real = shutil.which("cc")
    assert real is not None, "these tests need a C compiler"
    strict = [real, *build.FLAGS, "-Wall", "-Wextra", "-Werror", *flags, "-o", str(tmp_path / "x.so"), str(SOURCE)]
    done = subprocess.run(strict, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (flags != ["-ffast-math"]), done.stderr
