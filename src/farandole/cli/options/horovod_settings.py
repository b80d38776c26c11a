"""What the flags of horovodrun come to: variables for the ranks, plan keys, and what has no effect.

A typed flag goes before the configuration file, wherever it stands on the line.
"""

from __future__ import annotations

import argparse
import reprlib
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...core.env import inside_lsf
from ...core.job_plan import PlanRequest, stall_warnings
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import did_you_mean, install_command
from .horovod_flags import FLAGS, Flag, typed_flags

_NO_MPI = (
    "MPI support has not been built.  If this is not expected, ensure MPI is installed and reinstall Horovod "
    "with HOROVOD_WITH_MPI=1 to debug the build error."
)
_NO_JOB_OF_LSF = (
    "Horovod did not detect an LSF job.  The jsrun launcher can only be used in that environment. "
    "Please, pick a different launcher for other environments."
)


@dataclass(frozen=True)
class HorovodSettings:
    """What the ranks and the plan are told."""

    environment: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, PlanRequest] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """A line for each flag that has no effect here, saying why."""


def add_general_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of horovodrun that are about no variable of the ranks."""
    group = parser.add_argument_group("horovodrun's other options")
    group.add_argument(
        "--config-file", metavar="FILE", help="YAML file of the options below; the command line overrides it"
    )
    group.add_argument(
        "--network-interfaces", dest="interfaces", metavar="A,B", help="network interfaces of the ranks"
    )
    group.add_argument(
        "--network-interface", dest="more_interfaces", action="append", default=[], metavar="A",
        help="the same, a single one",
    )  # fmt: skip
    group.add_argument(
        "--mpi-launch-flag", dest="launch_words", action="append", default=[], metavar="TEXT",
        help="the variables in it are set for the ranks: 'env NAME=VALUE ...'; no MPI is used",
    )  # fmt: skip
    controllers = group.add_mutually_exclusive_group()
    controllers.add_argument(
        "--gloo",
        dest="controller",
        action="store_const",
        const="gloo",
        help="accepted: gloo is the only controller",
    )
    controllers.add_argument(
        "--mpi", dest="controller", action="store_const", const="mpi", help="refused: no MPI is used"
    )
    controllers.add_argument(
        "--jsrun", dest="controller", action="store_const", const="jsrun", help="refused: start with jsrun itself"
    )


def read_settings(options: argparse.Namespace) -> HorovodSettings:
    """Return what the flags and the configuration file come to; raise `ConfigError` for what is wrong."""
    file = ConfigFile({}, None, [])
    if options.config_file is not None:
        file = read_config_file(Path(options.config_file))
    _check_controller(options.controller or file.controller)
    typed = typed_flags(options)
    values = {**file.values, **typed}
    environment = _interfaces(options) | _launch_variables(options)
    plan: dict[str, PlanRequest] = {}
    notes = list(file.notes)
    for flag in FLAGS:
        if flag.name not in values:
            continue
        value = values[flag.name]
        flag.check(value)
        source = flag.spelling if flag.name in typed else f"{options.config_file}: {flag.config}"
        if flag.variable:
            environment[flag.variable] = flag.text(value)
        if flag.plan is not None:
            for key, wanted in flag.plan(value).items():
                plan[key] = PlanRequest(wanted, source, flag.name in typed)
        if flag.no_effect:
            notes.append(f"{source} has no effect: {flag.no_effect}")
    warnings = stall_warnings(environment)
    if warnings:
        plan.pop("timeout_seconds", None)
    return HorovodSettings(environment, plan, (*notes, *warnings))


def _check_controller(controller: str | None) -> None:
    if controller == "mpi":
        raise ConfigError(_NO_MPI, remedy="farandole needs no MPI: leave --mpi out")
    if controller == "jsrun":
        if not inside_lsf():
            raise ConfigError(_NO_JOB_OF_LSF, remedy="leave --jsrun out")
        raise ConfigError(
            "--jsrun: ranks are not started through jsrun", remedy="start with: jsrun python train.py"
        )


def _launch_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that are set in words for MPI's launcher, as guides write them: env A=1, -x A=1."""
    found: dict[str, str] = {}
    for text in options.launch_words:
        try:
            words = [word for word in shlex.split(text) if word not in ("env", "-x", "--env", "-env")]
        except ValueError as problem:
            raise ConfigError(f"--mpi-launch-flag {text!r}: {problem}", remedy="close the quotes") from None
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not name.isidentifier():
                raise ConfigError(
                    f"--mpi-launch-flag {text!r}: {word!r} is no NAME=VALUE, and no MPI is used to take it",
                    remedy="leave it out; -x NAME=VALUE sets a variable of the ranks",
                )
            found[name] = value
    return found


def _interfaces(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that name the interfaces, checked against those of this machine."""
    texts = [*([options.interfaces] if options.interfaces is not None else []), *options.more_interfaces]
    names = [name.strip() for text in texts for name in text.split(",")]
    if not names:
        return {}
    known = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--network-interfaces: this machine has no {name!r}", remedy=did_you_mean(name, known)
            )
    joined = ",".join(names)
    return {"GLOO_SOCKET_IFNAME": joined, "NCCL_SOCKET_IFNAME": joined, "HOROVOD_GLOO_IFACE": names[0]}


# The configuration file of horovodrun (``--config-file``, YAML): sections of keys, each a flag of the table.
#
# Its tables are derived from `horovod_flags.FLAGS`; ``controller: gloo`` stands beside them. Unknown keys and
# wrong types are errors that name the file, the key and the nearest known one.


MOST_CHARACTERS = 1 << 15
"""Longest file: all keys need a tenth of it, and a YAML parser takes seconds for odd and long ones."""
_CONTROLLERS = ("gloo", "mpi")
_RETIRED = {"logging.hide_timestamp": "logging.with_timestamp"}
"""Keys of old files that Horovod does not read any more either."""
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class ConfigFile(NamedTuple):
    """What a configuration file says."""

    values: dict[str, Any]
    """By flag name."""
    controller: str | None
    notes: list[str]


def read_config_file(path: Path) -> ConfigFile:
    """Read a configuration file; raise `ConfigError` for what it must not say, or without PyYAML."""
    content = _load(path)
    by_key = {flag.config: flag for flag in FLAGS if flag.config}
    sections = {key.partition(".")[0] for key in by_key}
    values: dict[str, Any] = {}
    notes = []
    controller = None
    for section, keys in content.items():
        if section == "controller":
            controller = _controller(keys, path)
            continue
        if section not in sections:
            known = [*sections, "controller"]
            raise ConfigError(
                f"{path}: unknown key {reprlib.repr(section)}", remedy=did_you_mean(str(section), known)
            )
        if keys is None:
            continue  # a section with no key under it
        if not isinstance(keys, dict):
            raise ConfigError(f"{path}: {section}: expected keys with values, got {reprlib.repr(keys)}")
        for key, value in keys.items():
            name = f"{section}.{key}"
            if name in _RETIRED:
                notes.append(f"{path}: {name} has no effect; use {_RETIRED[name]}")
            elif name not in by_key:
                known = [each.partition(".")[2] for each in by_key if each.startswith(f"{section}.")]
                raise ConfigError(
                    f"{path}: unknown key {str(key)!r} in {section}", remedy=did_you_mean(str(key), known)
                )
            elif value is not None:
                values[by_key[name].name] = _value(by_key[name], value, f"{path}: {name}")
    return ConfigFile(values, controller, notes)


def _load(path: Path) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"--config-file {path} needs PyYAML", remedy=f"install it with: {install_command('horovod')}"
        ) from None
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot read {path}: {problem}") from None
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"{path} is longer than {MOST_CHARACTERS} characters", remedy="is it a configuration of horovodrun?"
        )
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(problem).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected sections of keys")
    return content


def _controller(value: Any, path: Path) -> str:
    if value not in _CONTROLLERS:
        raise ConfigError(
            f"No such controller supported: {value if isinstance(value, str) else reprlib.repr(value)}",
            remedy=f"{path}: controller is gloo or mpi",
        )
    return str(value)


def _value(flag: Flag, value: Any, where: str) -> Any:
    fits = isinstance(value, flag.kind) or (flag.kind is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and flag.kind is not bool):
        raise ConfigError(f"{where}: expected {_KINDS[flag.kind]}, got {reprlib.repr(value)}")
    if flag.choices and value not in flag.choices:
        raise ConfigError(f"{where}: expected one of {', '.join(flag.choices)}, got {reprlib.repr(value)}")
    return flag.kind(value)
