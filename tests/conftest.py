"""For all tests: environment and machine stay as they were, and a skip is an error where CI must not skip."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.machine_state import take_places
from tests.machine_watch import LEFT_BEHIND, MachineWatch
from tests.selection import mark_full
from tests.warm import close_server

# A loaded machine must not fail a property.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Jobs that tests start with `python` get this one, as in an activated environment.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

_PLACES = take_places()
_WATCH = MachineWatch(_PLACES)


# Tests that run in the background of a script, or under nohup, are deaf to these. What they start must not be.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL),
):  # fmt: skip
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the gate leaves out: see `tests.selection`."""
    mark_full(items, all_cases=not any("::" in each for each in config.args))


@pytest.fixture(scope="session", autouse=True)
def _warm_python_ends() -> Iterator[None]:
    yield
    close_server()


@pytest.fixture(autouse=True)
def _environment_is_left_as_it_was() -> Iterator[None]:
    before = dict(os.environ)
    yield
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # torch sets its own at the first optimizer
    os.environ.clear()
    os.environ.update(before)
    assert not changed, f"the test changed environment variables: {sorted(changed)}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test by name that changed the machine, after its fixtures and its module's are gone."""
    try:
        return (yield)
    finally:
        _WATCH.check(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that leaves temporary files, or changed the machine outside of tests."""
    if _WATCH.finish() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = LEFT_BEHIND


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left, and by which test; and what any program here may have changed meanwhile."""
    for line in _WATCH.wrong:
        terminalreporter.write_line(line, red=True)
    for line in _WATCH.told:
        terminalreporter.write_line(f"changed on this machine meanwhile, by a test or another program: {line}")


def pytest_unconfigure() -> None:
    """Take our places away; a worker's are its session's."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _PLACES.remove()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI only GPU tests may skip."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail") and "gpu" not in item.keywords:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
