"""A script that says `import horovod` and finds `farandole.horovod`, without a change to it.

``farandole run --as-horovod`` puts the folder `shim` first on its ranks' PYTHONPATH and nowhere else, so that
installing farandole hides no other Horovod. The folder has one package, `horovod`, which installs a finder:
``horovod.x.y`` *is* the module ``farandole.horovod.x.y``, the same object under a second name. So classes are
identical, and a test that patches one patches the other.

Beside an installed Horovod all of this is refused: it would be unclear which of both a script uses.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from ..core.vocabulary.errors import ConfigError

SHIM = Path(__file__).resolve().parent / "shim"
API_VERSION = "0.28.1"
"""The version of Horovod whose names these are. Plain, because programs take it apart in every way they know."""
_FRONT_ENDS = ("ray", "spark")


def horovod_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ranks whose `horovod` is ours; raise `ConfigError` beside another one."""
    if found := find_real_horovod():
        raise ConfigError(
            f"--as-horovod: {found} is installed beside farandole, and only one can be `import horovod`",
            remedy="pip uninstall horovod, or leave --as-horovod out and `import farandole.horovod.torch as hvd`",
        )
    return {
        "PYTHONPATH": _first(str(SHIM), inherited.get("PYTHONPATH", "")),
        "PATH": _first(str(SHIM / "bin"), inherited.get("PATH", os.defpath)),
        "FARANDOLE_PYTHON": sys.executable,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def find_real_horovod(search: Sequence[str] | None = None) -> str:
    """Return which other Horovod there is and where; nothing when there is none."""
    search = [entry for entry in (sys.path if search is None else search) if not _is_shim(entry)]
    for distribution in importlib.metadata.distributions(name="horovod", path=list(search)):
        return f"horovod {distribution.version} in {distribution.locate_file('')}"
    spec = PathFinder.find_spec("horovod", search)
    # A folder without __init__.py is not an installed package.
    return f"a package horovod in {spec.origin}" if spec is not None and spec.origin is not None else ""


class _SameModule(Loader):
    """Gives a module that exists already a second name."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import system has just put the second name there


class SecondNames(MetaPathFinder):
    """Finds ``horovod.x`` in ``farandole.horovod.x``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where the module is; raise ModuleNotFoundError, saying why, for front ends we do not have."""
        package, _, rest = fullname.partition(".")
        if package != "horovod" or not rest:
            return None
        ours = f"farandole.horovod.{rest}"
        try:
            spec = importlib.util.find_spec(ours)
        except ModuleNotFoundError:
            spec = None
        if spec is not None:
            is_package = spec.submodule_search_locations is not None
            return ModuleSpec(fullname, _SameModule(ours), is_package=is_package)
        if rest.startswith("runner."):
            raise ModuleNotFoundError(
                f"{fullname}: jobs are started by farandole's launcher, which has no such part; there are "
                "horovod.run and horovod.runner.launch.run_commandline "
                "(see docs/run/launch.md)",
                name=fullname,
            )
        if rest.partition(".")[0] in _FRONT_ENDS:
            raise ModuleNotFoundError(
                f"{fullname}: farandole has no front end for horovod.{rest.partition('.')[0]}; "
                "it has horovod.torch, horovod.tensorflow and horovod.keras (see docs/run/launch.md)",
                name=fullname,
            )
        return None


def become_horovod() -> None:
    """Install the second names. Called by the package `horovod` of the shim alone."""
    if found := find_real_horovod():
        raise ImportError(f"farandole stands in for horovod here (--as-horovod), but {found} is there too")
    if not any(isinstance(finder, SecondNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, SecondNames())


def _is_shim(entry: str) -> bool:
    return os.path.realpath(entry) == str(SHIM)


def _first(entry: str, rest: str) -> str:
    entries = [each for each in rest.split(os.pathsep) if each and each != entry]
    return os.pathsep.join([entry, *entries])
