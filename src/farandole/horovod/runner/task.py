"""A rank of `horovod.run`: reads the function from the job's folder, calls it, leaves its result there."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from ...core.launchers.rank_variables import read_rank_variables
from .job_folder import FUNCTION, result_path, write_private_bytes


def main(folder: Path) -> None:
    """Call the function of `folder`."""
    import cloudpickle

    function, args, kwargs = pickle.loads((folder / FUNCTION).read_bytes())
    result = function(*args, **kwargs)
    place = read_rank_variables()
    write_private_bytes(result_path(folder, place.rank if place else 0), cloudpickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
