"""A rank that calls one function: it reads the function from the job's folder and leaves the result there.

The folder is 0700 and its files are 0600, so that no other user can replace a pickle.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from ...core.launchers.rank_variables import read_rank_variables
from ...core.vocabulary.run_files import write_private

FUNCTION = "function.pkl"


def result_path(folder: Path, rank: int) -> Path:
    """Return where rank `rank` leaves its result."""
    return folder / f"result_{rank}.pkl"


def main(folder: Path) -> None:
    """Call the function of `folder`."""
    import cloudpickle

    function, args, kwargs = pickle.loads((folder / FUNCTION).read_bytes())
    result = function(*args, **kwargs)
    place = read_rank_variables()
    write_private(result_path(folder, place.rank if place else 0), cloudpickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
