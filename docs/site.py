"""What the site has beside docs/: README as its first page, CONTRIBUTING, CHANGELOG, and the examples.

A hook of mkdocs (`mkdocs.yml`). Links are those of the repository: a page that is elsewhere on the site gets its
address there, and a file that is not on the site is named only.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
MOVED = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples": "examples/index.md",
}
"""Where pages of the repository are on the site; the others are below docs/ there, and here without it."""
_AWAY = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are outside of docs/, and the examples."""
    old = files.get_file_from_path("README.md")
    if old is not None:
        files.remove(old)
    for source, page in MOVED.items():
        if source.endswith(".md"):
            files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    examples = sorted((ROOT / "examples").glob("*.py"))
    index = "".join(f"- [{path.name}]({path.stem}.md): {_first_line(path)}\n" for path in examples)
    files.append(File.generated(config, MOVED["examples"], content=f"# Examples\n\n{index}"))
    for path in examples:
        text = path.read_text(encoding="utf-8")
        page = f"# {path.name}\n\n```python\n{text}```\n"
        files.append(File.generated(config, f"examples/{path.stem}.md", content=page))
    return files


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def on_config(config: Any) -> Any:
    """Give the examples a place in the navigation."""
    names = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    pages = [{"All": MOVED["examples"]}, *({f"{name}.py": f"examples/{name}.md"} for name in names)]
    config.nav.insert(-1, {"Examples": pages})
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Let links lead to pages of the site; records of measurements come last in a search."""
    here = page.file.src_uri
    if here.startswith("results/"):
        page.meta["search"] = {"boost": 0.3}
    source = next((each for each, there in MOVED.items() if there == here), f"docs/{here}")
    parts = re.split(r"(^```.*?^```[^\n]*$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        part if number % 2 else _LINK.sub(lambda link: _moved(link, source, here, files), part)
        for number, part in enumerate(parts)
    )


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Take the script that makes search work from the disk from docs/, and not from the network."""
    if _AWAY not in output:
        raise PluginError(
            f"{page.file.src_uri}: the theme does not load {_AWAY} any more: see docs/frame-worker.js"
        )
    here = posixpath.relpath("frame-worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace(_AWAY, f'<script src="{here}"></script>')


def on_post_template(output: str, *, template_name: str, config: Any) -> str:
    """Leave it out of the page of a wrong address, which no disk has."""
    return output.replace(_AWAY, "")


def _moved(link: re.Match[str], source: str, here: str, files: Files) -> str:
    mark, text, target = link.groups()
    if re.match(r"[a-z]+:|#", target):
        return link.group()
    path, hash_, anchor = target.partition("#")
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = MOVED.get(wanted) or re.sub(
        r"^docs/|^(examples/.*)\.py$", lambda m: f"{m[1]}.md" if m[1] else "", wanted
    )
    if files.get_file_from_path(page) is None:
        if wanted.startswith("docs/"):
            return link.group()  # mkdocs says that it is dead
        return text
    return f"{mark}[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{hash_}{anchor})"
