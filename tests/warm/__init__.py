"""Python that has imported torch already, for tests whose commands start trainings.

[Note: warm Python] Importing torch, with what torch's first optimizer imports, and letting go of it again take 2.5
s of a core for every rank. So one process, the server, imports it once. `run` asks it to fork, and the child
becomes ``python -m farandole ...``; `start` does so and goes on, for tests that look at a job while it runs. When
that launcher starts a rank with `subprocess`, the rank is forked of the launcher instead of being executed, and
becomes ``python train.py``. Everything else is what it would be: ranks are children of their launcher, in
sessions, in namespaces and on cores of their own, with pipes, environment, directory and signals as after `exec`,
with modules of farandole imported anew, and with an interpreter that ends as interpreters do. `start` can ask for
other packages to be imported too: there is a server for each set of them, and of the settings they read.

Where it ends: ranks of one job share a hash seed and addresses, their command line in /proc is the server's, a
stack that is printed from outside goes on below the script, garbage is not looked for among what torch imports,
and of torch everything is there that an optimizer imports. A test of any of these, and of how processes that are
killed, stopped or signalled from outside end and what is left of them, starts them for real:
`tests.ranks.test_launch.run`. So do ranks over ssh, Slurm, MPI, Ray and torchrun. ``FARANDOLE_TEST_COLD=1`` makes
all do so.
"""

from .client import Started, close_server, python, run, start

__all__ = ["Started", "close_server", "python", "run", "start"]
