"""Links between the pages lead to files and headings that exist."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Final

import pytest

from tests.docs.test_docs import PAGES, ROOT, name_of

LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
FENCED: Final = re.compile(r"^\s*(`{3,}).*?^\s*\1\s*$", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """Return the anchor of a heading on GitHub and in mkdocs."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text).strip())


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)}


def broken_links(page: str, text: str) -> list[str]:
    """The links of a page that lead nowhere; links to other sites are not followed."""
    broken = []
    for target in LINK.findall(FENCED.sub("", text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        place, _, anchor = target.partition("#")
        file = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(page), place)) if place else ROOT / page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    return broken


OTHERS: Final = [*(ROOT / "examples").rglob("*.md"), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", [*PAGES, *sorted(OTHERS)], ids=name_of)
def test_every_link_of_a_page_leads_to_a_page_or_heading_that_exists(page: Path) -> None:
    assert broken_links(name_of(page), page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](promises.md), [b](nowhere.md), [c](promises.md#no-such-heading) and [d](https://example.com/x.md)"
    assert broken_links("docs/design.md", text) == ["nowhere.md", "promises.md#no-such-heading"]
