"""Score `farandole diagnose` on trainings that others could have written: the first fix is pasted as printed.

    python -m benchmarks.verdict_strangers --page docs/results/verdicts-strangers.md

Needs an idle machine with two cores, root for the emulated hosts, and the package transformers. `strangers.py` has
the trainings and their faults. Each case runs healthy, with its fault and with the first fix of the diagnosis, one
after the other, `--repeat` times; steps are medians. Scored are:

- verdict: the costliest finding of the first faulty run is of the right kind, and names the rank if one has it;
- price: its cost, and that of others of these kinds, is within 15 % of what a step of the faulty run takes more
  than one of the healthy run;
- promise: the step gets shorter by at least 0.8 of what the fix said; for the same samples, where it changes how
  many a step has.

Pasting is what a person does: a command runs as it stands; arguments go into the call that they name; lines for
"before the loop", "after each step" and "after the loop" go there. Where the first fix is nothing to paste
("look for...", "do it less often"), or a command that shows more and changes nothing, it is scored apart, by what
removing the fault gives.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for `python -m benchmarks.verdict_strangers`

import verdict_pages as pages
from farandole.core.vocabulary.degrees import ORDER
from farandole.observe.diagnose.finding import OUTSIDE
from shared import ROOT
from strangers import STRANGERS, Stranger
from strangers_divided import DIVIDED

BEGIN = "<!-- figures of benchmarks/verdict_strangers.py -->"
BEGIN_DIVIDED = "<!-- figures of benchmarks/verdict_strangers.py: divided models -->"
"""In the page: what stands before them, and from the next heading on, is kept."""
_LOOKS = ("fd.phase(", "top -o", "ethtool ", "bench collectives", "rsync ")
"""Text of what is pasted to see more, not to make anything faster."""


class Lab:
    """Where the runs of one case are made."""

    def __init__(self, case: Stranger, directory: Path) -> None:
        self.case, self.directory, self.count = case, directory, 0
        self.is_file = "\n" not in case.script
        self.script = ROOT / case.script if self.is_file else directory / "train.py"

    def command(self, farandole: str) -> list[str]:
        """Return a line of the case, as typed."""
        script = [str(self.script), *self.case.arguments.split()]
        return ["farandole", *shlex.split(farandole), "--", "python", *script]

    def run(self, words: list[str], text: str, *, is_faulty: bool = True) -> dict[str, Any]:
        """Run a line of ``farandole`` with a script's text; return the diagnosis of the run."""
        self.count += 1
        where = self.directory / str(self.count)
        where.mkdir()
        if not self.is_file:
            self.script.write_text(text)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with pages.burning(self.case.burner and is_faulty):
            run, diagnosis = pages.diagnosed(words, where, {**os.environ, "PATH": path})
        for left in where.glob("*.pt"):
            left.unlink()
        summary = json.loads((run / "summary.json").read_text())
        return diagnosis | {"samples_per_step": (summary["samples"] or 0) / summary["steps"]}

    def healthy(self) -> dict[str, Any]:
        """Return the diagnosis of a run without the fault."""
        case = self.case
        words = self.command(case.healthy_command or case.command)
        return self.run(words, case.text(case.healthy or {}), is_faulty=False)

    def faulty(self) -> dict[str, Any]:
        """Return the diagnosis of a run with the fault."""
        return self.run(self.command(self.case.command), self.case.text(self.case.places))

    def pasted(self, paste: str) -> dict[str, Any]:
        """Return the diagnosis of a run with a fix."""
        text = self.case.text(self.case.places)
        words = self.command(self.case.command)
        *lines, last = paste.splitlines()
        if last.startswith("farandole "):
            words = shlex.split(last)
            if lines:  # in place of DistributedDataParallel
                text = text.replace("model = DistributedDataParallel(model)\n", "")
                text = text.replace("fd.record(model, optimizer, loader)", "\n".join(lines))
        else:
            text = edit(text, paste, self.case.paste_at)
        return self.run(words, text)


def edit(text: str, paste: str, replaced: str) -> str:
    """Return a script with what a fix says to paste, put where the fix says it belongs.

    Raises `ValueError` where the script has no such place.
    """
    if replaced and "each step" in paste:
        return _around_the_loop(text, paste, replaced)
    code, _, comment = (part.strip() for part in paste.partition("#"))
    if "argument" in comment:
        call = comment.split(" of ", 1)[1].removeprefix("the ").split(",")[0].strip()
        return _with_arguments(text, call, code)
    if code.startswith("torch.set_num_threads") and "torch.set_num_threads" in text:
        return re.sub(r"torch\.set_num_threads\([^)]*\)", code, text)
    if "before the loop" in comment or code.startswith("torch.set_num_threads"):
        return re.sub(r"^(step = 0|for step)", lambda found: f"{code}\n{found[0]}", text, count=1, flags=re.M)
    raise ValueError(f"nobody could say where this belongs: {paste!r}")


def _around_the_loop(text: str, paste: str, replaced: str) -> str:
    lines = [line for line in paste.splitlines() if not line.startswith("#")]
    before, each, after = lines[0], lines[1], lines[2]
    text = text.replace(replaced, each)
    text = re.sub(r"^(step = 0|for step)", lambda found: f"{before}\n{found[0]}", text, count=1, flags=re.M)
    return re.sub(r"^print\(", lambda found: f"{after}\n{found[0]}", text, count=1, flags=re.M)


def _with_arguments(text: str, call: str, arguments: str) -> str:
    """Return a script whose call of `call` has these arguments in place of its own of the same names."""
    found = re.search(rf"{re.escape(call)}\(", text[text.rindex("import ") :])
    if found is None:
        raise ValueError(f"the script has no call of {call}")
    begin = text.rindex("import ") + found.end()
    depth, end = 1, begin
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    inside = text[begin : end - 1]
    for name in re.findall(r"(\w+)=", arguments):
        inside = re.sub(rf",?\s*\b{name}=[^,()]+", "", inside)
    return f"{text[:begin]}{inside.rstrip().rstrip(',')}, {arguments}{text[end - 1 :]}"


def judge(case: Stranger, directory: Path, repeat: int) -> dict[str, Any]:
    """Run a case and score it."""
    lab = Lab(case, directory)
    compared = bool(case.kinds) and case.healthy is not None
    healthy, faulty = [lab.healthy()] if compared else [], [lab.faulty()]
    # A slow start is a fact beside the verdict, of which a healthy run is none the worse.
    findings = [found for found in faulty[0]["findings"] if found["kind"] not in OUTSIDE - {*case.kinds}]
    first = findings[0] if findings else None
    fix = first["fixes"][0] if first and first["fixes"] else None
    row: dict[str, Any] = {
        "case": case.name,
        "kind": first["kind"] if first else None,
        "share": first and first["share"],
    }
    paste, gain = (fix["paste"], fix["gain"]) if fix else ("", None)
    by_hand = not paste or any(text in paste for text in _LOOKS)
    scored = bool(fix and not by_hand and gain and gain["seconds"] > 0)
    if not case.kinds:
        row["right"] = first is None or first["share"] < pages.LITTLE
        scored = scored and not row["right"]
    else:
        row["right"] = pages.is_right(first, case.kinds, case.ranks)
    pasted = []
    for number in range(repeat if compared or scored else 1):
        if number:
            healthy += [lab.healthy()] if compared else []
            faulty.append(lab.faulty())
        if scored:
            pasted.append(lab.pasted(paste))
    row |= {"faulty": middle(faulty), "title": first and first["title"], "paste": paste, "repeat": repeat}
    row |= {"fix": fix and fix["what"], "promised": gain and gain["seconds"]}
    row["all_kinds"] = [each["findings"][0]["kind"] if each["findings"] else None for each in faulty]
    if compared:
        row["healthy"] = middle(healthy)
        row["truth"] = row["faulty"] - row["healthy"]
        if first is not None:
            mine = [found["seconds"] for found in findings if found["kind"] in case.kinds]
            row["cost"] = sum(mine) or first["seconds"]
            row["price"] = row["cost"] / row["truth"]
    if by_hand and gain and compared:
        row["by_hand"] = row["truth"] / gain["seconds"]
    if scored and fix:
        was, now = faulty[0]["samples_per_step"], pasted[0]["samples_per_step"]
        is_larger = was and now and {"loader_batch", *ORDER} & set(fix["changes"])
        row["pasted"] = middle(pasted) * (was / now if is_larger else 1)  # for the same samples
        row["gained"] = row["faulty"] - row["pasted"]
        row["kept"] = row["gained"] / row["promised"]
        if not case.kinds:
            row["right"] = row["kept"] >= pages.ENOUGH  # it was none too many
    return row


def middle(runs: list[dict[str, Any]]) -> float:
    return statistics.median(float(run["step_seconds"]) for run in runs)


ASKED = {
    "right": "verdict right in >= 95 %",
    "price": "price within 15 % in >= 85 %",
    "kept": "first fix, pasted, gives >= 0.8 of its promise in >= 90 %",
    "by_hand": "first fix is not to paste: removing the fault gives >= 0.8 of its promise",
}


def shown_fix(row: Mapping[str, Any]) -> str:
    """Return what was pasted, short; in words where nothing is to be pasted."""
    paste = row["paste"] or ""
    if row.get("kept") is None:
        return f"by hand: {textwrap.shorten(row['fix'] or '', 60, placeholder='...')}" if row["kind"] else ""
    if paste.splitlines()[-1].startswith("farandole"):
        words = shlex.split(paste.splitlines()[-1])
        return " ".join(
            f"`{' '.join(words[at : at + 2])}`" for at, word in enumerate(words) if word in ("-np", "--set")
        )
    return f"`{textwrap.shorten(paste.partition('#')[0] or paste.splitlines()[1], 60, placeholder='...')}`"


def main() -> int:
    arguments = pages.read_arguments(str(__doc__), repeat=3)
    cases = {case.name: case for case in (*STRANGERS, *DIVIDED)}

    def play_case(name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            try:
                return judge(cases[name], Path(directory), arguments.repeat)
            finally:
                if arguments.keep:
                    shutil.copytree(directory, arguments.keep / name, dirs_exist_ok=True)

    rows, failed = pages.play(list(cases), play_case, arguments)
    for begin, group in ((BEGIN, STRANGERS), (BEGIN_DIVIDED, DIVIDED)):
        names = [case.name for case in group]
        own = [row for row in rows if row["case"] in names]
        if own:
            parts = [pages.summarise(own, ASKED), pages.table(own, "first fix", shown_fix)]
            pages.publish(own, names, parts, begin, arguments.page)
    return failed


if __name__ == "__main__":
    sys.exit(main())
