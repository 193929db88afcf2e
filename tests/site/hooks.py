"""The hooks that mkdocs calls during the build of the site.

Every page keeps its path in the project, so mkdocs follows and checks the links among README.md, docs/ and examples/. A
linked file that is no page, such as an example, is shown on a page. The hooks copy no file and rewrite no link.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

from tests.site.commands import with_commands
from tests.site.messages import with_messages
from tests.site.reference import reference_pages

ROOT: Final = Path(__file__).resolve().parents[2]
OWN: Final = ("site.css", "iframe-worker.js")
"""Files beside this one that every page loads."""
IMAGES: Final = (".png", ".svg")
LANGUAGES: Final = {".json": "json", ".pml": "c", ".py": "python", ".sh": "sh", ".toml": "toml", ".yml": "yaml"}

LINK: Final = re.compile(r"\]\(([^)\s#]+)")
TABLE: Final = re.compile(r"<table>.*?</table>", re.DOTALL)
HEAD: Final = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
CELL: Final = re.compile(r"<td\b")
ROW: Final = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
FENCE: Final = re.compile(r"^(\s*`{3,}[ \t]*\w+)[ \t]+.*$", re.MULTILINE)


class Shown(File):
    """A file whose text is shown on a separate page."""

    def is_documentation_page(self) -> bool:
        return True

    @property
    def content_string(self) -> str:
        text = (ROOT / self.src_uri).read_text()
        return f"# {self.src_uri}\n\n````{LANGUAGES.get(Path(self.src_uri).suffix, 'text')}\n{text}\n````\n"

    @content_string.setter
    def content_string(self, value: str) -> None:
        raise AttributeError(f"{self.src_uri}: the text of a shown file cannot be changed")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site: the theme, docs/, README.md, all files that these link to, and the API
    reference."""
    wanted = ["README.md", *(f"docs/{file.src_uri}" for file in files if file.src_dir == config.docs_dir)]
    found: dict[str, File] = {}
    for path in wanted:  # the loop appends to the list
        if path in found or not (ROOT / path).is_file():
            continue
        found[path] = _file(path, config)
        if path.endswith(".md"):
            # The list of messages is for readers of a checkout; the site has its tables.
            wanted += linked(path, with_messages((ROOT / path).read_text()))
    return Files(
        [
            *(file for file in files if file.src_dir != config.docs_dir),
            *found.values(),
            *(File.generated(config, path, content=text) for path, text in reference_pages()),
            *(File.generated(config, name, content=(Path(__file__).parent / name).read_text()) for name in OWN),
        ]
    )


def on_page_markdown(markdown: str, **_: object) -> str:
    """Insert the commands and the messages. Remove the words after the language of a fence, which only tests use."""
    return FENCE.sub(r"\1", with_messages(with_commands(markdown)))


def on_page_content(html: str, **_: object) -> str:
    """Add the name of the column to each cell of a table. On narrow screens, ``site.css`` shows each row as a card."""
    return TABLE.sub(lambda table: _with_labels(table[0]), html)


def _with_labels(table: str) -> str:
    head, mark, body = table.partition("</thead>")
    labels = [re.sub(r"<[^>]+>", "", each).strip() for each in HEAD.findall(head)]

    def row(found: re.Match[str]) -> str:
        names = iter(labels)
        return CELL.sub(lambda cell: f'{cell[0]} data-label="{next(names, "")}"', found[0])

    return head + mark + ROW.sub(row, body)


def linked(path: str, text: str) -> Iterator[str]:
    """Yield the project paths that a page links to, without links to other sites and to files outside of the
    project."""
    for target in LINK.findall(text):
        place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if "://" not in target and not target.startswith(("/", "mailto:")) and not place.startswith("../"):
            yield place


def _file(path: str, config: MkDocsConfig) -> File:
    """Return a file with its path in the site, which is its project path without ``docs/``."""
    place = path.removeprefix("docs/")
    if path.endswith(".md"):
        place = re.sub(r"(README)?\.md$", lambda found: "index.html" if found[1] else ".html", place)
        return File(path, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=place)
    if path.endswith(IMAGES):
        return File(path, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=place)
    return Shown(
        path,
        os.fspath(ROOT),
        config.site_dir,
        config.use_directory_urls,
        dest_uri=f"{place}.html",
        inclusion=InclusionLevel.NOT_IN_NAV,
    )
