"""``python -m tests.ranks.elastic_launch OPTIONS -- COMMAND``: an elastic job without the command line around it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.launch.contract import Job
from farandole.launch.elastic.driver import ElasticJob, run_elastic
from farandole.launch.elastic.options import ElasticOptions
from farandole.launch.output import Output


def main() -> int:
    given = json.loads(sys.argv[1])
    hosts = given.pop("hosts", {})
    script = given.pop("discovery_script", None)
    directory = Path.cwd() / "run"
    for name in ("logs", "crashes"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    options = ElasticOptions(discovery_script=None if script is None else Path(script), **given)
    job = ElasticJob(
        command=sys.argv[2:],
        options=options,
        job=Job("127.0.0.1", 0, directory, threads=1),
        environment=dict(os.environ),
        hosts=hosts,
    )
    output = Output(directory, 0)
    try:
        outcome = run_elastic(job, output)
    except FarandoleError as error:
        sys.stderr.write(f"farandole: {error}\n")
        return error.exit_code
    finally:
        output.close()
    if outcome.failure is not None:
        sys.stderr.write(outcome.failure.to_text(directory) + "\n")
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
