"""`farandole.keras` itself imports nothing heavy: a script may import it before it sets KERAS_BACKEND."""

from __future__ import annotations

import subprocess
import sys

import pytest

import farandole.keras


def test_the_import_is_light() -> None:
    code = "import sys, farandole.keras; assert not {'keras', 'numpy', 'tensorflow', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert dir(farandole.keras) == ["shard"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = farandole.keras.nothing
