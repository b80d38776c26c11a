"""Warm Python against a real one: what a rank sees, says and returns is the same, and it is a true child."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.ranks import test_launch as real
from tests.ranks.pool import patient
from tests.ranks.test_launch import gone_within, script
from tests.warm.client import is_warm

pytestmark = [
    pytest.mark.skipif(not is_warm(), reason="FARANDOLE_TEST_COLD is set: nothing is to be warm"),
    patient,
]

# What a program can see of how it was started; last what each rank draws for itself.
SEES = """
import atexit, builtins, ctypes, gc, json, os, resource, signal, stat, sys, tempfile, threading, warnings
name = dict(os.environ)
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death))
streams = {n: getattr(sys, n) for n in ("stdin", "stdout", "stderr")}
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags),
    "executable": sys.executable, "program": os.readlink("/proc/self/exe"), "warnoptions": sys.warnoptions,
    "main": {k: repr(v) for k, v in globals().items() if k in ("__name__", "__file__", "__doc__", "__package__",
             "__spec__", "__cached__", "__builtins__")},
    "loader": type(__loader__).__name__ if not isinstance(__loader__, type) else __loader__.__name__,
    "ours": sorted(n for n in sys.modules if n.partition(".")[0] in ("farandole", "tests")),
    "environment": {k: v for k, v in name.items() if "PORT" not in k and "SECRET" not in k and "RUN_DIR" not in k},
    "C": {k: ctypes.CDLL(None).getenv and os.environ.get(k) for k in ("RANK", "OMP_NUM_THREADS")},
    "cwd": os.getcwd(), "umask": oct(os.umask(0o22)), "nice": os.nice(0),
    "cores": sorted(os.sched_getaffinity(0)),
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "death": death.value, "threads": len(os.listdir("/proc/self/task")),
    "files": sorted(n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
    "kinds": [stat.S_IFMT(os.fstat(n).st_mode) for n in range(3)],
    "inherit": [os.get_inheritable(n) for n in range(3)], "blocking": [os.get_blocking(n) for n in range(3)],
    "signals": {int(n): repr(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    "wakeup": signal.set_wakeup_fd(-1), "timer": signal.getitimer(signal.ITIMER_REAL),
    "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
    "streams": {n: [type(s).__name__, s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode,
                s.isatty(), type(s.buffer).__name__] for n, s in streams.items()},
    "same": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile(), gc.isenabled(),
              gc.get_threshold()],
    "temporary": tempfile.gettempdir(), "running": [t.name for t in threading.enumerate()],
    "filters": [[f[0], getattr(f[1], "pattern", f[1]), f[2].__name__, f[4]] for f in warnings.filters
                if f[2].__module__ == "builtins" and not f[1]],
}
import torch
seen["torch"] = [torch.get_num_threads(), torch.is_grad_enabled(), str(torch.get_default_dtype())]
import numpy, random
with open(f"seen.{os.environ['RANK']}", "w") as file:
    json.dump([seen, numpy.random.rand(), random.random(), torch.rand(1).item()], file)
"""


def sees(directory: Path, runner: Any, words: list[str], environment: dict[str, str]) -> list[Any]:
    options = ("-np", "2", "--run-dir", "run", "--quiet")
    done = runner(directory, "run", *options, "--", *words, environment=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads((directory / f"seen.{rank}").read_text()) for rank in (0, 1)]
    for rank in (0, 1):
        (directory / f"seen.{rank}").unlink()
    subprocess.run(["rm", "-r", "run"], cwd=directory, check=True)
    return found


def without_addresses(seen: Any) -> Any:
    return json.loads(re.sub(r"0x[0-9a-f]+", "0x", json.dumps(seen)))


@pytest.mark.full("slow")
@pytest.mark.parametrize("how", ["file", "module", "words"])
def test_a_program_sees_what_it_sees_in_a_real_python(tmp_path: Path, how: str) -> None:
    name = script(tmp_path, SEES, "program.py")
    words = {"file": [name], "module": ["-u", "-m", "program"], "words": ["-c", SEES]}[how]
    more = {"PYTHONPATH": str(tmp_path / "more"), "TMPDIR": str(tmp_path), "NAME": "ä"}
    runs = [
        sees(tmp_path, runner, [sys.executable, *words, "--lr", "0.1"], more) for runner in (real.run, warm.run)
    ]
    for rank in (0, 1):
        expected, got = runs[0][rank][0], runs[1][rank][0]
        assert without_addresses(got) == without_addresses(expected)
    (_, *one), (_, *other) = runs[1]
    assert not {*one} & {*other}, "every rank draws its own numbers"


ENDS = {
    "nothing": "pass",
    "code": "sys.exit(7)",
    "large code": "sys.exit(300)",
    "words": "sys.exit('in words')",
    "error": "def f():\n    raise KeyError('no')\nf()",
    "interrupt": "raise KeyboardInterrupt",
    "hook": "sys.excepthook = lambda *e: print('hook', e[0].__name__, file=sys.stderr)\n1 / 0",
    "abort": "os.abort()",
    "kill": "os.kill(os.getpid(), 9)",
    "terminated": "os.kill(os.getpid(), 15)\ntime.sleep(9)",
    "thread": "threading.Thread(target=lambda: (time.sleep(0.2), print('last'))).start()",
    "exit in exit": "atexit.register(os._exit, 5)",
    "syntax": "eval('1 +')",
    "unraisable": "class D:\n    def __del__(self): 1 / 0\nd = D()\ndel d",
    "loaders": "from concurrent.futures import ThreadPoolExecutor as P\nprint(P(1).submit(int, 3).result())",
    "spawn": "import multiprocessing as m\nif __name__ == '__main__':\n"
    "    p = m.get_context('spawn').Process(target=print, args=['child']); p.start(); p.join()",
    "subprocess": "subprocess.run([sys.executable, '-c', 'print(3)'], check=True)",
}  # fmt: skip
BEFORE = """
import atexit, os, subprocess, sys, threading, time
atexit.register(print, "bye")
class Late:
    def __del__(self): print("collected")
late = Late()
print("begin", file=sys.stderr)
"""


@pytest.mark.gate_cases("exit in exit")
@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_as_in_a_real_python(tmp_path: Path, how: str) -> None:
    name = script(tmp_path, BEFORE + ENDS[how], "program.py")
    expected = subprocess.run(
        [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=40, check=False
    )
    got = warm.python(tmp_path, name)
    if how == "interrupt":  # of what a real one lets go of after its exit handlers, ours has done nothing
        expected.stdout = expected.stdout.replace("collected\n", "")
    said = [[done.returncode, done.stdout, done.stderr] for done in (expected, got)]
    assert without_addresses(said[1]) == without_addresses(said[0])


def test_ranks_are_children_of_the_launcher_and_die_with_it(tmp_path: Path) -> None:
    text = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
open(f"new.{os.environ['RANK']}", "w").write(f"{os.getppid()} {os.getpid()} {child.pid}")
os.rename(f"new.{os.environ['RANK']}", f"up.{os.environ['RANK']}")
if os.environ["RANK"] == "0":
    while not os.path.exists("up.1"):
        time.sleep(0.01)
    os.kill(os.getppid(), 9)
time.sleep(600)
"""
    done = warm.run(tmp_path, "run", "-np", "2", "--", sys.executable, script(tmp_path, text))
    assert done.returncode == -signal.SIGKILL
    told = [[int(word) for word in (tmp_path / f"up.{rank}").read_text().split()] for rank in (0, 1)]
    assert told[0][0] == told[1][0], "one launcher"
    assert gone_within([pid for line in told for pid in line], 5.0)


@pytest.mark.full("slow")
def test_one_that_takes_too_long_is_killed_with_its_ranks(tmp_path: Path) -> None:
    text = "import os, time\nopen(f\"up.{os.environ['RANK']}\", 'w').write(str(os.getpid()))\ntime.sleep(600)"
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(tmp_path, "run", "-np", "2", "--", sys.executable, script(tmp_path, text), timeout=6)
    assert time.monotonic() - begin < 20
    assert gone_within([int((tmp_path / f"up.{rank}").read_text()) for rank in (0, 1)], 5.0)
    assert warm.python(tmp_path, "-c", "print(1)").stdout == "1\n", "the server goes on"


@pytest.mark.full("further")
def test_several_run_side_by_side_and_each_ends_by_itself(tmp_path: Path) -> None:
    # One write a line: both write into one file.
    line = "sys.stdout.write(f\"{'torch' in sys.modules} {sys.argv[1]}\\n\")"
    text = f"import sys, time\n{line}\nsys.stdout.flush()\ntime.sleep(600)"
    name = script(tmp_path, text)
    with (tmp_path / "out").open("w") as out:
        one, other = (warm.start(tmp_path, name, word, out=out, err=out) for word in ("one", "other"))
    deadline = time.monotonic() + 20
    while len((tmp_path / "out").read_text().splitlines()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["True one", "True other"]
    one.send_signal(signal.SIGTERM)
    assert one.wait(10) == -signal.SIGTERM
    assert other.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.1)
    assert warm.python(tmp_path, "-c", "print(1)").stdout == "1\n", "the server does not wait for them"
    other.kill()
    assert other.wait(10) == -signal.SIGKILL
    assert other.poll() == -signal.SIGKILL
    other.kill()  # nobody


def test_what_only_a_real_interpreter_can_do_gets_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('customised')")
    for environment, words, said in (
        ({"PYTHONPATH": str(tmp_path)}, ["-c", "print(1)"], "customised\n1\n"),
        ({"PYTHONHASHSEED": "3"}, ["-c", "import sys; print(sys.flags.hash_randomization)"], "1\n"),
        ({}, ["-O", "-c", "import sys; print(sys.flags.optimize)"], "1\n"),
    ):
        assert warm.python(tmp_path, *words, environment=environment).stdout == said


@pytest.mark.full("slow")
def test_a_launcher_and_its_ranks_are_warm(tmp_path: Path) -> None:
    text = "import sys\nprint('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    for environment, expected in (({}, "True True"), ({"OMP_WAIT_POLICY": "passive"}, "False False")):
        done = warm.run(
            tmp_path, "run", "-np", "2", "--", sys.executable, script(tmp_path, text), environment=environment
        )
        assert sorted(done.stdout.splitlines()) == [f"[0] {expected}", f"[1] {expected}"], done.stderr


@pytest.mark.full("slow")
def test_packages_that_are_asked_for_are_imported_once_for_their_settings(tmp_path: Path) -> None:
    (tmp_path / "package_with_settings.py").write_text(
        "import os\nos.environ['TF_OF_ITS_OWN'] = '1'\nread, importer = os.environ['TF_READ'], os.getpid()\n"
    )
    name = script(
        tmp_path, "import sys, package_with_settings as p\nprint('torch' in sys.modules, p.read, p.importer)"
    )
    launcher = ["-m", "farandole", "run", "-np", "2", "--quiet", "--run-dir"]
    importers = []
    for setting in ("1", "2"):
        with (tmp_path / setting).open("w") as out:
            job = warm.start(
                tmp_path, *launcher, f"run{setting}", "--", sys.executable, name, out=out, err=out,
                imports=("package_with_settings",),
                environment={"PYTHONPATH": str(tmp_path), "TF_READ": setting},
            )  # fmt: skip
        assert job.wait(60) == 0, (tmp_path / setting).read_text()
        lines = [line.partition("] ")[2].split() for line in (tmp_path / setting).read_text().splitlines()]
        assert [line[:2] for line in lines] == [["True", setting]] * 2
        importers.append({line[2] for line in lines})
    assert [len(each) for each in importers] == [1, 1], "one import for both ranks"
    assert importers[0] != importers[1], "and one for other settings"
