"""The page in a real browser: at two widths, light and dark, without scripts, zoomed, printed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.observe.report import write_report
from tests.unit.observe.report.browser import Browser
from tests.unit.observe.report.full_runs import full_run

CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = color => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
  const light = color => {
    const [r, g, b] = color.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = element => {
    const above = element.parentElement ? ground(element.parentElement) : [255, 255, 255];
    return over(rgba(getComputedStyle(element).backgroundColor), above);
  };
  const poor = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("title")) continue;
    const below = ground(element), text = over(rgba(getComputedStyle(element).color), below);
    const [a, b] = [light(text), light(below)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push([walker.currentNode.data.trim(), (a + 0.05) / (b + 0.05)]);
  }
  return poor;
})()
"""
OVERLAPS = """
[...document.querySelectorAll(".across, .up")].flatMap(axis => {
  const boxes = [...axis.children].map(label => label.getBoundingClientRect());
  return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b =>
    a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom
  ).map(() => axis.textContent));
})
"""
SMALLEST = """
Math.min(...[...document.querySelectorAll("main *")].filter(e => e.textContent.trim() && e.getClientRects().length)
  .map(e => parseFloat(getComputedStyle(e).fontSize)))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    full_run(home / "one", ranks=1, hosts=["node-a"])
    name = "a-host-with-a-rather-long-name.of-a-cluster.example"
    run = full_run(
        home / "a-run-with-a-long-name-that-has-nowhere-to-break", ranks=8, steps=100, buckets=24, wire=0.003,
        slow={5: {"backward": 0.03}}, pauses={50: 0.2, 70: 0.1}, hosts=["node-a", name],
        command=["python", "train.py", "--data", "/" + "x" * 300],
    )  # fmt: skip
    return write_report(run)


@pytest.mark.gate_cases("390-True", "390-False")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_is_readable_and_asks_for_nothing(
    browser: Browser, page: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.querySelectorAll('svg').length") > 15
    assert browser.evaluate(CONTRAST) == []
    assert browser.evaluate(OVERLAPS) == []
    assert browser.evaluate(SMALLEST) >= 12
    dark_ground = browser.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark_ground == dark
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert browser.complaints() == []
    assert browser.requests() == []


def test_timelines_zoom_and_come_back(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280)
    box = "document.querySelector('.zoom svg').getAttribute('viewBox')"
    whole = browser.evaluate(box)
    press = "document.querySelectorAll('.zoom-bar')[0].querySelectorAll('button')[{}].click()"
    browser.evaluate(press.format(0))
    left, _, width, _ = map(float, browser.evaluate(box).split())
    assert (left, width) == (250.0, 500.0)
    assert browser.evaluate("document.querySelector('.zoom .across').textContent").endswith("ms")
    for _ in range(20):
        browser.evaluate(press.format(0))
    assert float(browser.evaluate(box).split()[2]) == 2.0, "there is an end to it"
    assert browser.evaluate(OVERLAPS) == []
    browser.evaluate(press.format(4))
    assert browser.evaluate(box) == whole
    turn = "new WheelEvent('wheel', {deltaY: -1, %s, clientX: 400, cancelable: true, bubbles: true})"
    browser.evaluate("document.querySelector('.zoom svg').dispatchEvent(" + turn % "ctrlKey: true" + ")")
    assert float(browser.evaluate(box).split()[2]) == 800.0
    browser.evaluate("document.querySelector('.zoom svg').dispatchEvent(" + turn % "ctrlKey: false" + ")")
    assert float(browser.evaluate(box).split()[2]) == 800.0, "the page scrolls as ever"
    assert browser.complaints() == []


def test_without_scripts_all_is_there_but_the_zoom(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.open(page, width=390, scripts=False)
    assert browser.evaluate("document.querySelectorAll('.zoom-bar').length") == 0
    assert browser.evaluate("document.querySelectorAll('.zoom rect title').length") > 100
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    browser.call("Emulation.setScriptExecutionDisabled", value=False)


CUT_OFF = """
[...document.querySelectorAll(".wide")].filter(box => box.scrollWidth > box.clientWidth + 1)
  .map(box => box.innerText)
"""


def test_a_table_that_is_wider_than_a_phone_says_that_it_scrolls(browser: Browser, page: Path) -> None:
    browser.open(page, width=390)
    hints = browser.evaluate(
        "[...document.querySelectorAll('.scrolls')].map(box => getComputedStyle(box, '::before').content)"
    )
    assert hints
    assert all("scroll sideways" in hint for hint in hints), hints
    assert browser.evaluate("document.querySelectorAll('.scrolls').length") == len(browser.evaluate(CUT_OFF))


def test_on_paper_nothing_is_cut_off_and_evidence_is_open(browser: Browser, page: Path) -> None:
    browser.open(page, width=690)  # A4 within its margins
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.evaluate(CUT_OFF) == []
    assert browser.evaluate("getComputedStyle(document.querySelector('.wide')).overflowX") == "visible"
    evidence = "[...document.querySelectorAll('.finding details ul')].map(list => list.getClientRects().length)"
    assert 0 not in browser.evaluate(evidence)
    assert browser.evaluate(evidence)
    together = "document.querySelector('.finding').getBoundingClientRect().top"
    assert browser.evaluate(together) < 980, "what to do begins on the first page"


def test_it_prints(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280, dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("getComputedStyle(document.querySelector('.zoom-bar')).display") == "none"
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert len(printed) > 20_000
