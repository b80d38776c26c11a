"""What `farandole emulate` starts on its first host."""

from __future__ import annotations

import pytest

from farandole.cli.commands.emulate import _command
from farandole.core.vocabulary.errors import ConfigError


def test_a_script_of_horovods_names_is_started_so() -> None:
    assert _command(["--", "python", "-c", "0"], [], as_horovod=True)[3:5] == ["run", "--as-horovod"]
    verify = ["--", "farandole", "verify", "-np", "2", "--", "python", "-c", "0"]
    assert _command(verify, [], as_horovod=True)[3:5] == ["verify", "--as-horovod"]
    with pytest.raises(ConfigError, match="--as-horovod is for farandole run"):
        _command(["--", "farandole", "doctor"], [], as_horovod=True)
