"""The site of the documentation has every page and every public name, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import griffe
import pytest

from tests.project.public_api import PUBLIC, ROOT, owners
from tests.site.commands import helps
from tests.site.fields import Fields
from tests.site.hooks import linked, on_page_content, on_page_markdown

NAV = set(re.findall(r"^ +- [^:]+: (\S+)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2], re.MULTILINE))


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=project,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    pages |= {f"reference/{module}.md" for module in PUBLIC}
    assert pages - NAV == set()
    assert {page for page in NAV if not page.startswith("reference/") and not (ROOT / page).is_file()} == set()


def test_no_summary_of_a_command_is_cut() -> None:
    """A list of commands shows their whole first sentences, even on a terminal of 80 columns."""
    text = "\n".join(text for _, text in helps(columns=80))
    assert re.findall(r"^  [a-z-]+  .*\.\.\.$", text, re.MULTILINE) == []
    assert text.count("\nCommands:\n") > 5


@pytest.mark.slow  # a build reads and renders the whole project, in 15 s
@pytest.mark.timeout(240)
def test_the_site(tmp_path: Path) -> None:
    """One build serves all assertions about the site."""
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    texts = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.html")}

    described = {module: set(re.findall(r'id="([\w.]+)"', texts[f"reference/{module}.html"])) for module in PUBLIC}
    names = [(module, f"{module}.{name}") for (_, name), module in owners().items()]
    assert [name for module, name in names if name not in described[module]] == [], "public, and not in the reference"
    assert len(names) > 150

    fences = [page for page, text in texts.items() if "```" in text]
    assert fences == [], "a fence that is not shown as code"
    assert "examples/kafka/wrap_a_consumer.py.html" in texts, "an example that a page links to has a page"

    loads = r'<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)="?((?:https?:)?//[^" >]+)|@import|<form[^>]+http'
    assert {page: found for page, text in texts.items() if (found := re.findall(loads, text))} == {}


@pytest.mark.parametrize(
    ("path", "text", "targets"),
    [
        ("docs/b/kafka.md", "[a](../../examples/kafka/a.py), [b](b.md#c)", ["examples/kafka/a.py", "docs/b/b.md"]),
        ("README.md", "[a](docs/a.md) ![b](docs/b.svg)\n[c](#here)", ["docs/a.md", "docs/b.svg"]),
        ("docs/a.md", "[a](https://example.com/a.md) [b](mailto:a@example.com) [c](/etc/hosts) [d](../../b.md)", []),
    ],
)
def test_what_a_page_links_to(path: str, text: str, targets: list[str]) -> None:
    assert list(linked(path, text)) == targets


def test_a_fence_keeps_its_language_alone() -> None:
    page = "```python nats forever\nx = 1\n```\n\n- a\n\n    ````sh kafka\n    make\n    ````\n"
    assert on_page_markdown(page) == "```python\nx = 1\n```\n\n- a\n\n    ````sh\n    make\n    ````\n"


SOURCE = '''
from dataclasses import dataclass
from typing import NamedTuple

@dataclass
class Settings:
    """How.

    ``a``: one of ``"x"``: or none. ``b`` and ``c``: both of
    them. What ``a``: is not.

    ``a`` alone: is prose.
    """

    a: int = 1
    b: int = 2
    c: int = 3

class Pair(NamedTuple):
    """Two."""

    left: int
    right: int

def call(where, when):
    """Call.

    ``where``: there. ``whence``: unknown.
    """
'''


def test_a_paragraph_of_fields_becomes_a_table() -> None:
    extensions = griffe.load_extensions(Fields)
    with griffe.temporary_visited_package("fields", {"__init__.py": SOURCE}, extensions=extensions) as module:
        texts = {name: module[name].docstring.value for name in ("Settings", "Pair", "call")}
    assert texts == {
        "Settings": 'How.\n\nArgs:\n    a: one of ``"x"``: or none.\n    b: both of them. What ``a``: is not.\n'
        "    c: both of them. What ``a``: is not.\n\n``a`` alone: is prose.",
        "Pair": "Two.\n\nAttributes:\n    left: \n    right: ",
        "call": "Call.\n\nArgs:\n    where: there. ``whence``: unknown.",
    }


def test_the_cells_of_a_table_name_their_columns() -> None:
    table = (
        "<table>\n<thead>\n<tr>\n<th><code>a</code></th>\n<th>b</th>\n</tr>\n</thead>\n<tbody>\n{}</tbody>\n</table>"
    )
    row = "<tr>\n<td{}>1</td>\n<td{}></td>\n</tr>\n"
    shown = on_page_content("<p>x</p>" + table.format(row.format("", "")))
    assert shown == "<p>x</p>" + table.format(row.format(' data-label="a"', ' data-label="b"'))
