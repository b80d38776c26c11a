"""What the plan predicted, beside what was measured."""

from __future__ import annotations

from ..content import Block, Code, Run, Section, Table, Text


def make(run: Run) -> Section | None:
    """Return the table of terms; None of a run whose plan predicts nothing."""
    check = run.summary.prediction
    if check is None:
        return None
    blocks: list[Block] = [
        Table(
            ["term", "predicted", "measured", "ratio", ""],
            check.rows(),
            note="A step, mean over the ranks and the steps after the warm-up. Exchanges count as far as nothing "
            "hides them; the terms and what nothing predicts add up to the step.",
        )
    ]
    blocks += [Text(note) for note in check.notes]
    if check.remedy:
        blocks += [Text(f"{check.advice()}."), Code(check.remedy)]
    lead = {
        True: "The step is within the predicted interval.",
        False: "The step is outside of the predicted interval.",
        None: "",
    }[check.is_inside]
    return Section("predicted", "Predicted against measured", blocks, lead)
