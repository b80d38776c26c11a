"""The blacklist and host discovery."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.vocabulary.errors import ConfigError, LaunchError
from farandole.launch.elastic.driver import Discovery, parse_hosts
from farandole.launch.elastic.membership import Blacklist


def test_a_failed_host_is_closed_for_ever_without_a_range() -> None:
    blacklist = Blacklist()
    assert blacklist.is_open("a", 0.0)
    assert blacklist.count_failure("a", 0.0) == float("inf")
    assert not blacklist.is_open("a", 1e12)
    assert blacklist.is_closed_for_ever("a")
    assert blacklist.is_open("b", 0.0)


def test_delays_double_up_to_the_longest() -> None:
    blacklist = Blacklist((1.0, 20.0), random.Random(0))
    delays = [blacklist.count_failure("a", 100.0) - 100.0 for _ in range(2000)]
    for delay, least in zip(delays, [2.0, 4.0, 8.0, 16.0], strict=False):
        assert least <= delay <= least + 1.0
    assert set(delays[4:]) == {20.0}
    assert not blacklist.is_open("a", 119.9)
    assert blacklist.is_open("a", 120.0)
    assert blacklist.failures("a") == 2000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:2\nb\n", {"a": 2, "b": 1}),
        ("", {}),
        ("# none\n\n  a:3  \n", {"a": 3}),
        ("a:1\na:2\n", {"a": 3}),
        ("10.0.0.1:4\r\n", {"10.0.0.1": 4}),
        ("a:0\n", {}),
    ],
)
def test_lines_of_hosts(text: str, expected: dict[str, int]) -> None:
    assert parse_hosts(text, 1) == expected


@pytest.mark.parametrize("text", ["a:x", "a b:2", ":2", "a:-1", "a:5000", "-oProxy=x:1", "a:\u0663"])
def test_lines_that_are_no_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="line"):
        parse_hosts(text, 1)


@given(st.text())
def test_any_text_is_hosts_or_an_error(text: str) -> None:
    try:
        assert all(slots > 0 for slots in parse_hosts(text, 1).values())
    except ValueError:
        return


def write(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def until(discovery: Discovery, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if discovery.poll():
            return True
        time.sleep(0.01)
    return False


def test_changes_are_found_and_old_hosts_stay_first(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("b:1\n")
    discovery = Discovery(write(tmp_path / "find", f"cat {tmp_path}/hosts"), period_seconds=0.02)
    assert until(discovery)
    (tmp_path / "hosts").write_text("a:2\nb:3\n")
    assert until(discovery)
    assert list(discovery.hosts.items()) == [("b", 3), ("a", 2)]
    assert not until(discovery, 0.2)
    discovery.close()


@pytest.mark.parametrize("text", ["exit 3", "echo a b c", "kill -9 $$", "head -c 3000000 /dev/zero"])
def test_a_first_answer_that_fails_is_an_error(tmp_path: Path, text: str) -> None:
    discovery = Discovery(write(tmp_path / "find", text), period_seconds=0.02)
    with pytest.raises(ConfigError, match=r"host discovery script .*find' failed"):
        until(discovery)
    discovery.close()


def test_a_script_that_hangs_is_killed(tmp_path: Path) -> None:
    script = write(tmp_path / "find", f"echo $$ > {tmp_path}/pid; sleep 600")
    discovery = Discovery(script, limit_seconds=0.3)
    with pytest.raises(ConfigError, match=r"did not end within 0\.3 s"):
        until(discovery)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_later_failures_keep_the_hosts_until_the_time_out(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a:1\n")
    discovery = Discovery(
        write(tmp_path / "find", f"cat {tmp_path}/hosts"), period_seconds=0.02, timeout_seconds=0.4
    )
    assert until(discovery)
    (tmp_path / "hosts").unlink()
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"has failed for 0\.4 s, last: exit code 1"):
        until(discovery)
    assert time.monotonic() - begin > 0.4
    assert discovery.hosts == {"a": 1}


def test_a_script_that_cannot_be_executed(tmp_path: Path) -> None:
    (tmp_path / "find").write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match=r"cannot be executed; chmod \+x"):
        Discovery(tmp_path / "find").poll()
    with pytest.raises(ConfigError, match="cannot be executed; name an"):
        Discovery(tmp_path / "none").poll()


def test_fixed_hosts_are_known_at_once() -> None:
    discovery = Discovery(None, fixed={"a": 2})
    assert discovery.poll()
    assert discovery.hosts == {"a": 2}
    assert not discovery.poll()
