"""The site is built without a dead link, has every page, and can be read and searched without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(root / "mkdocs.yml"), "-d", str(site)]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = build(ROOT, place)
    assert done.returncode == 0, done.stderr
    return place


def test_every_page_is_there_and_needs_no_network(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    moved = {Path("README"), Path("results/README")}
    assert pages - built == moved
    assert {Path("index"), Path("contents"), Path("results/index")} <= built
    assert "One model over many ranks" in (site / "contents.html").read_text()
    assert "Three lines" in (site / "index.html").read_text()
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="((?:https?:)?//[^"]+)"', path.read_text())
        assert not loaded, (path.name, loaded)


def test_a_dead_link_and_a_page_without_a_place_are_errors(tmp_path: Path) -> None:
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    with (tmp_path / "docs" / "start.md").open("a") as page:
        page.write("\n[one](run/nowhere.md), [two](run/launch.md#nowhere)\n")
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for word in ("run/nowhere.md", "#nowhere", "lost.md"):
        assert word in done.stderr, done.stderr


@pytest.mark.full("further")
@pytest.mark.parametrize("width", [400, 1280])
def test_search_works_from_the_disk(site: Path, width: int, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs chromium")
    options = ["--headless", "--no-sandbox", f"--user-data-dir={tmp_path}", f"--window-size={width},900"]
    page = f"file://{site}/start.html?q=powersgd"
    done = subprocess.run(
        [browser, *options, "--timeout=20000", "--dump-dom", page],
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), str(tmp_path))},
    )  # fmt: skip
    assert re.search(r"\d+ matching documents", done.stdout), "the index is not searched"
    assert "fast/slow-networks.html" in done.stdout
