"""The site of the documentation has every page and every public name, and loads nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Final

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


def test_the_sidebar_lists_about_twenty_pages() -> None:
    """The others are in closed groups: examples, contracts of sources, the API, internals."""
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    shown = set(re.findall(r"^ {6}- [^:]+: (\S+)$", nav, re.MULTILINE))
    assert 15 <= len(shown) <= 25
    assert len(NAV - shown) > 50
    inner = ("reference/", "docs/design", "docs/model", "examples/")
    assert [page for page in shown if page.startswith(inner)] == []


def test_no_summary_of_a_command_is_cut() -> None:
    """A list of commands shows their whole first sentences, even on a terminal of 80 columns."""
    text = "\n".join(text for _, text in helps(columns=80))
    assert re.findall(r"^  [a-z-]+  .*\.\.\.$", text, re.MULTILINE) == []
    assert text.count("\nCommands:\n") > 5


BROWSER: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def dom(page: Path, profile: Path, *, query: str = "", width: int = 1280) -> str:
    """A page of the disk as a browser shows it, after its scripts have run."""
    assert BROWSER is not None
    shown = subprocess.run(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--allow-file-access-from-files", f"--user-data-dir={profile}", f"--window-size={width},900"),
            *("--virtual-time-budget=20000", "--dump-dom", f"{page.as_uri()}{query}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return shown.stdout


MEASURE: Final = """
<!doctype html><title>measure</title><pre id="result"></pre><script>
const frame = document.createElement("iframe"), cut = [], pages = PAGES;
frame.style = "border: 0; height: 900px; width: WIDTHpx";
document.body.append(frame);
const next = () => {
  const page = pages.shift();
  if (page === undefined) { document.getElementById("result").textContent = JSON.stringify(cut); return; }
  frame.onload = () => setTimeout(() => {
    for (const code of frame.contentDocument.querySelectorAll("pre > code")) {
      const text = code.closest(".language-text") !== null, first = code.textContent.slice(0, 40);
      const button = code.parentElement.querySelector(".md-code__button");
      const top = code.getBoundingClientRect().top + parseFloat(getComputedStyle(code).paddingTop);
      const wide = code.scrollWidth > code.clientWidth + 1, scrolled = getComputedStyle(code).overflowX === "auto";
      if (wide && !(text && scrolled && WIDTH < 500)) cut.push([page, "cut off", first]);
      if (WIDTH < 500 && button && button.getBoundingClientRect().bottom > top + 4) cut.push([page, "covered", first]);
    }
    next();
  }, 50);
  frame.src = page;
};
next();
</script>
"""
"""A page that measures the code of others. Output, which is scrolled on a narrow screen, is no program."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A build reads and renders the whole project, in 15 s."""
    folder = tmp_path_factory.mktemp("site") / "site"
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


with_a_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium")


@with_a_browser
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("width", [1280, 390])
def test_no_code_is_cut_off_or_covered(site: Path, width: int) -> None:
    # An example keeps its lines of 120 columns, and is wrapped as every program is.
    pages = [str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "measure.html"]
    (site / "measure.html").write_text(MEASURE.replace("PAGES", json.dumps(sorted(pages))).replace("WIDTH", str(width)))
    shown = dom(site / "measure.html", site.with_name("profile"), width=max(width, 1300))
    (result,) = re.findall(r'<pre id="result">(.+?)</pre>', shown)
    assert json.loads(unescape(result)) == []


@with_a_browser
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_search_works_without_a_server(site: Path) -> None:
    shown = dom(site / "guides" / "retries.html", site.with_name("profile"), query="?q=dead+letters")
    assert re.search(r'md-search-result__meta">\d+ matching documents', shown)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_site_has_its_pages_and_loads_nothing_from_other_hosts(site: Path) -> None:
    """One build serves all assertions about the site."""
    texts = {
        str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html") if path.name != "measure.html"
    }

    described = {module: set(re.findall(r'id="([\w.]+)"', texts[f"reference/{module}.html"])) for module in PUBLIC}
    names = [(module, f"{module}.{name}") for (_, name), module in owners().items()]
    assert [name for module, name in names if name not in described[module]] == [], (
        "these public names are missing in the reference"
    )
    assert len(names) > 150

    fences = [page for page, text in texts.items() if "```" in text]
    assert fences == [], "these pages show a fence as text"
    assert "examples/kafka/wrap_a_consumer.py.html" in texts, "a linked example must have a page"

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
def test_the_links_of_a_page_are_found(path: str, text: str, targets: list[str]) -> None:
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
