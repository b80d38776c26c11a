"""Steps beside stock DDP over links of several rates, interleaved, and the chart of README.

    python benchmarks/slow_links.py --out docs/results/slow-links.json --rounds 4
    python benchmarks/slow_links.py --draw docs/results/slow-links.json docs/slow-links.svg

The model is that of `farandole bench step`: a language model of 27.4 million parameters on two emulated hosts
with a rank each. Every rate is one run of it, in which the contenders take turns. `--draw` reads what a run has
written.
"""

from __future__ import annotations

import json
import math
import subprocess
from html import escape
from pathlib import Path

from shared import FARANDOLE, Run, make_parser, report, say

NAMES = {
    "ddp-tuned": ("DDP, best bucket size", "#9aa7b5"),
    "none": ("Farandole, exact", "#4c78a8"),
    "int8": ("Farandole, int8", "#f58518"),
    "int4": ("Farandole, int4", "#e45756"),
}
"""Contenders, what the chart calls them, and their colours."""
_WITH_FACTORS = {"int8": -10.0, "int4": 20.0}
"""Contenders whose points say how many times as fast as DDP they are, and by how much below a point."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760.0, 380.0, 62.0, 46.0, 216.0, 64.0


def measure(rates: list[str], rounds: int) -> list[Run]:
    """Return the result of `farandole bench step` at each rate."""
    found = []
    for rate in rates:
        say(f"links of {rate}")
        words = ["bench", "step", "--hosts", "2", "--rate", rate, "--rounds", str(rounds), "--json"]
        done = subprocess.run(
            [*FARANDOLE, *words, "--contenders", ";".join(NAMES)], stdout=subprocess.PIPE, text=True, check=True
        )
        result = json.loads(done.stdout.strip().splitlines()[-1])
        rows = [{key: value for key, value in row.items() if key != "samples"} for row in result["rows"]]
        found.append({"rate": rate, "bits_per_second": result["bits_per_second"], "rows": rows})
        say("  " + ", ".join(f"{row['contender']} {row['seconds']:.2f} s" for row in rows))
    return found


def draw(result: Run) -> str:
    """Return the chart: seconds of a step over the rate of the link, both logarithmic."""
    links = sorted(result["links"], key=lambda link: link["bits_per_second"])
    rates = [link["bits_per_second"] / 1e6 for link in links]
    seconds = {
        name: [next(row["seconds"] for row in link["rows"] if row["contender"] == name) for link in links]
        for name in NAMES
    }
    low = min(0.5, 0.7 * min(min(values) for values in seconds.values()))
    high = 1.15 * max(max(values) for values in seconds.values())
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(rate: float) -> float:
        return _LEFT + math.log(rate / rates[0]) / (math.log(rates[-1] / rates[0]) or 1) * (right - _LEFT)

    def y(value: float) -> float:
        return bottom - math.log(value / low) / math.log(high / low) * (bottom - _TOP)

    lines = []
    for tick in (each for each in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if low <= each <= high):
        lines.append(f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{right}"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g} s</text>')
    lines += [f'<text x="{x(rate):.1f}" y="{bottom + 18}" text-anchor="middle">{rate:g}</text>' for rate in rates]
    for name, (text, color) in NAMES.items():
        places = [(x(rate), y(value)) for rate, value in zip(rates, seconds[name], strict=True)]
        points = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        dashes = ' stroke-dasharray="7 7"' if name == "none" else ""  # over DDP's, which takes as long
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"{dashes}/>')
        for (left, top), rate, value, stock in zip(
            places, rates, seconds[name], seconds["ddp-tuned"], strict=True
        ):
            said = f"<title>{escape(text)}: {value:.2f} s at {rate:g} Mbit/s</title>"
            lines.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="{color}">{said}</circle>')
            if name in _WITH_FACTORS:
                lines.append(
                    f'<text x="{left:.1f}" y="{top + _WITH_FACTORS[name]:.1f}" text-anchor="middle" '
                    f'style="fill:{color}">{stock / value:.1f} x</text>'
                )
    place = -math.inf
    for name in sorted(NAMES, key=lambda name: seconds[name][-1], reverse=True):
        text, color = NAMES[name]
        place = max(y(seconds[name][-1]) + 4, place + 16)
        lines.append(f'<text x="{right + 20}" y="{place:.1f}" style="fill:{color};font-weight:600">{text}</text>')
    title = "Seconds of a step over the rate of the link"
    notes = [
        "Mbit/s; both scales are logarithmic. x: times as fast as DDP.",
        f"{result['machine']}; {result['date']}",
    ]
    lines += [
        f'<text x="{_LEFT}" y="{_HEIGHT - 26 + 16 * row}">{escape(note)}</text>' for row, note in enumerate(notes)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
        f'aria-label="{title}"><style>text {{ font: 12px system-ui, sans-serif; fill: #667085; }} '
        ".grid { stroke: #98a2b3; stroke-opacity: .35; } .head { font-size: 14px; font-weight: 600; }</style>"
        f'<text class="head" x="{_LEFT}" y="22">{title}: 27.4 million parameters, 2 hosts</text>'
        f"{''.join(lines)}</svg>\n"
    )


def main() -> None:
    parser = make_parser(
        __doc__,
        rates=(["100mbit", "200mbit", "500mbit", "1gbit"], "of the links between both hosts"),
        rounds=4,
        out=(Path, "write what was measured, as JSON"),
    )
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("RESULT", "SVG"), help="draw a result")
    options = parser.parse_args()
    if options.draw is not None:
        result, page = options.draw
        page.write_text(draw(json.loads(result.read_text())), encoding="utf-8")
        return
    links = measure(options.rates, options.rounds)
    report({"links": links, "rounds": options.rounds, "jobs": "2 ranks, one a host"}, indent=1, out=options.out)


if __name__ == "__main__":
    main()
