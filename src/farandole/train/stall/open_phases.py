"""Phases that the user has announced with `fd.phase` and that are open: no step is expected meanwhile."""

from __future__ import annotations

from ...comm.world.world import World


class _OpenPhases(list[str]):
    """Names, the innermost last."""


def open_phases(here: World) -> list[str]:
    """Return the names of the phases that are open, as they change."""
    return here.session.keep(_OpenPhases, _OpenPhases)
