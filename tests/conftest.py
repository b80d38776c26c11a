"""For all tests: no leaked environment, and an error for a skip where CI must not skip."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A loaded machine must not fail a property.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Jobs that tests start with `python` get this one, as in an activated environment.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


# Tests that run in the background of a script, or under nohup, are deaf to these. What they start must not be.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL),
):  # fmt: skip
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(autouse=True)
def _environment_is_left_as_it_was() -> Iterator[None]:
    before = dict(os.environ)
    yield
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # torch sets its own at the first optimizer
    os.environ.clear()
    os.environ.update(before)
    assert not changed, f"the test changed environment variables: {sorted(changed)}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI only GPU tests may skip."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail") and "gpu" not in item.keywords:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
