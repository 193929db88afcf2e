"""The errors and warnings of the product for the site: one table for each area, made of ``tests/project/messages.txt``.

A row has the text with a `…` for each value, and the remedy that the text ends with, or the one of its kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.project.messages import FILE

PLACE: Final = (
    "> The tables are on the site only, which `make docs` builds in `.cache/site`. The checkout has the same texts, by "
    "module\n> and function, in [tests/project/messages.txt](../../tests/project/messages.txt)."
)
"""Where a page wants the tables. The page of a checkout says where its reader finds the texts."""

AREAS: Final = (
    ("Settings and consumer", ("lanes",)),
    ("Kafka", ("lanes_kafka",)),
    ("JetStream", ("lanes_jetstream", "lanes.cohort", "lanes.core.cohort")),
    ("PostgreSQL", ("lanes_postgres",)),
    ("Spark", ("lanes_spark",)),
    ("Histories and journals", ("lanes.history", "memsource.history", "memsource.cli")),
    ("Command line", ("lanes.cli",)),
)
"""Title and packages of each table. The longest prefix counts; the simulator's own errors stay with its guide."""

KINDS: Final = {
    "ConfigError": "`ConfigError`",
    "SourceError": "`SourceError`",
    "MessageError": "`MessageError`",
    "ContractError": "`ContractError`",
    "HandlerHalted": "`HandlerHalted`",
    "LanesError": "`LanesError`",
    "TypeError": "`TypeError`",
    "WARNING": "warning",
    "ERROR": "error in the log",
    "LOG": "warning",
    "Misuse": "command line",
    "for stop": "command line",
}

UNNAMED: Final = {
    "warning": "none at once: `lanes` goes on",
    "error in the log": "see Running above",
    "command line": "pass the option that the text names",
}
"""The remedy where a text names none; of every other kind, to remove the cause and start again."""

_OTHERWISE: Final = "remove the cause in the text, then start again"
_ENTRY: Final = re.compile(r"^    (?! )((?:for )?[A-Za-z_]+)[^:]*?: (.*(?:\n {8}(?! {2}).*)*)", re.MULTILINE)
_HOLE: Final = re.compile(r"\{[^{}]*\}")
_CHOICE: Final = re.compile(r"«([^«»]*)» if [^«»]* else «([^«»]*)»")
_VERBS: Final = (
    "add|allow|ask|await|begin|call|cast|change|check|choose|continue|correct|create|declare|delete|drain|drop|end|enter|"
    "exclude|extend|fix|give|grant|install|keep|leave|let|lower|make|move|must be|name|omit|pass|permit|pip|point|"
    "prevent|publish|put|quote|raise|read|reinstall|remove|rename|repair|repeat|replace|report|reset|restart|restore|"
    "return|run|save|select|send|separate|set|sort|split|start|stop|take|try|update|upgrade|use|wait|write"
)
_REMEDY: Final = re.compile(rf"(?<=[:;.]) (?:please |then |(?:if|for) [^:;.]*, )?(?:{_VERBS})\b", re.IGNORECASE)
"""Where the remedy of a text begins: a clause with an imperative."""


class Row(NamedTuple):
    """One text of the product."""

    kind: str
    text: str
    remedy: str


def with_messages(markdown: str) -> str:
    """The page with the tables in their place; every other page as it is."""
    return markdown.replace(PLACE, tables()) if PLACE in markdown else markdown


def tables() -> str:
    """A section with a table for each area."""
    by_area: dict[str, list[Row]] = defaultdict(list)
    for module, row in rows(FILE.read_text()):
        if area := area_of(module):
            by_area[area].append(row)
    return "\n".join(_table(title, by_area[title]) for title, _ in AREAS)


def rows(listed: str) -> Iterator[tuple[str, Row]]:
    """The module and the row of each text of a list of messages that a person reads as a whole."""
    for section in re.split(r"^\[", listed, flags=re.MULTILINE)[1:]:
        module, _, body = section.partition("]\n")
        for kind, text in _ENTRY.findall(body):
            fault, remedy = divided(shown(" ".join(text.split())))
            words = re.findall(r"[a-z]{2,}", re.sub(r"(?:and|then) start again", "", fault))
            if kind in KINDS and (fault == "…=…" or len(words) > 1):
                remedy = remedy or ("none at once: `lanes` tries again" if "[retryable=True]" in fault else "")
                yield module, Row(KINDS[kind], fault, remedy or UNNAMED.get(KINDS[kind], _OTHERWISE))


def shown(text: str) -> str:
    """A listed text as the reader meets it: the first of two wordings, and `…` for each value."""
    before = ""
    while before != text:
        before, text = text, _HOLE.sub("…", text)
    return re.sub(r"…(?:[ ]?…)+", "…", _CHOICE.sub(r"\1", text)).strip()


def divided(text: str) -> tuple[str, str]:
    """Split a text into its fault and the remedy at its end; without a remedy the second part is empty."""
    found = _REMEDY.search(text)
    return (text, "") if found is None else (text[: found.start() - 1], text[found.start() + 1 :])


def area_of(module: str) -> str | None:
    known = [
        (len(package), title)
        for title, packages in AREAS
        for package in packages
        if f"{module}.".startswith(f"{package}.")
    ]
    return max(known)[1] if known else None


def _table(title: str, found: list[Row]) -> str:
    lines = [f"### {title}\n", "| text | remedy | kind |", "|---|---|---|"]
    unique = sorted(set(found), key=lambda row: (row.text.lstrip("… :").lower(), row))
    return "\n".join([*lines, *(f"| {code(row.text)} | {_cell(row.remedy)} | {row.kind} |" for row in unique)]) + "\n"


def _cell(text: str) -> str:
    """A remedy as prose of a cell: what means something to Markdown is escaped, except code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([|*_<\[])", r"\\\1", part) for part in parts)


def code(text: str) -> str:
    """A text as code of a cell. There, the pages' Markdown shows a `|` as it is."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"
