"""The tables of docs/reference agree with the code: settings, defaults, errors, log lines and exit statuses."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

import lanes
from lanes import process
from tests.docs.test_docs import PAGES, name_of
from tests.project.messages import FILE
from tests.site import messages
from tests.site.commands import PLACE, with_commands

ROOT: Final = Path(__file__).resolve().parents[2]
REFERENCE: Final = ROOT / "docs" / "reference"
TELEMETRY: Final = set(re.findall(r"`(lanes\.[\w.]+)`", (REFERENCE / "telemetry.md").read_text()))
"""Names of metrics and attributes; ``tests/observe`` compares that page with what is exported."""
FORMATS: Final = {
    *("lanes.journal", "lanes.run", "lanes.history", "lanes.oldest"),
    *("lanes.kafka", "lanes.kafka.client", "lanes.jetstream", "lanes.jetstream.client", "lanes.postgres"),
}
"""Metadata of a journal, loggers, and the beginning of several metrics."""


def rows(page: str) -> list[list[str]]:
    """The rows of all tables of a page."""
    lines = (REFERENCE / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


@pytest.mark.parametrize("settings", [lanes.Settings, lanes.Retry])
def test_every_field_is_listed_with_its_default(settings: type[lanes.Settings | lanes.Retry]) -> None:
    listed = {row[0].strip("`"): row[1].strip('`"').replace(",", "") for row in rows("settings.md") if len(row) >= 4}
    for field in fields(settings):
        if field.default is not MISSING:
            shown = listed[field.name]
            assert shown == str(field.default) or float(shown) == field.default, field.name
        else:
            assert listed[field.name] == "Retry()"


def test_every_error_is_listed() -> None:
    listed = {name for row in rows("errors.md") for name in re.findall(r"`(?:lanes\.)?(\w+)", row[0])}
    errors = {
        name
        for name in lanes.__all__
        if isinstance(value := getattr(lanes, name), type) and issubclass(value, Exception)
    }
    assert errors - listed == set()


def test_every_log_line_is_one_that_is_written() -> None:
    said = " ".join((ROOT / "tests" / "project" / "messages.txt").read_text().split())
    said = re.sub(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\d+", "…", said)
    shown = [row[0].strip("`") for row in rows("errors.md") if len(row) == 4 and row[1] in ("error", "warning")]
    assert len(shown) > 5
    missing = [line for line in shown if not re.search(re.escape(line).replace("…", ".{1,120}"), said)]
    assert missing == []


def test_the_fields_of_a_message_are_listed_with_their_types() -> None:
    sources = ast.parse((ROOT / "lanes" / "core" / "types.py").read_text())
    (made,) = [each for each in ast.walk(sources) if isinstance(each, ast.ClassDef) and each.name == "Message"]
    types: dict[str, str] = {}
    for each in ast.walk(made):
        match each:
            case ast.FunctionDef(name="__init__"):
                types |= {one.arg: ast.unparse(one.annotation) for one in each.args.args if one.annotation is not None}
            case ast.FunctionDef(name=name, decorator_list=[_], returns=ast.expr() as returned) if name[0] != "_":
                # A property. The methods have a section of their own.
                types[name] = ast.unparse(returned)
            case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=annotation):
                types[name] = ast.unparse(annotation)
    page = (REFERENCE / "message.md").read_text()
    listed, sources_of, *_ = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    cell = r"^\| `(\w+)` \| `([^|]+)` \|"
    assert {name: kind.replace("` or `", " | ") for name, kind in re.findall(cell, listed, re.MULTILINE)} == types
    values = sources_of.partition("`lanes_postgres` stores")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", values, re.MULTILINE)) == set(types)
    assert {*lanes.Message.__slots__} <= set(types)


def test_the_faq_quotes_texts_that_exist() -> None:
    files = [FILE, *(ROOT / "lanes").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]
    # A literal that goes on in the next line is one text.
    said = " ".join(" ".join(re.sub(r"([\"'])\n\s*f?\1", "", path.read_text()).split()) for path in files)
    said = re.sub(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\d+", "…", said)
    quoted = [row[0].strip("`") for row in rows("faq.md") if len(row) == 3 and row[0].startswith("`")]
    # Texts of Python and of librdkafka.
    python = ("No module named", "KeyError: ", "has no attribute", "Task exception was never", "was never awaited")
    foreign = (*python, "No such configuration property", "Timed out LeaveGroupRequest")
    quoted = [text for text in quoted if not text.startswith(foreign)]
    assert len(quoted) > 25
    missing = [text for text in quoted if not re.search(re.escape(text).replace("…", ".{1,120}?"), said)]
    assert missing == []


def test_the_site_lists_every_error_and_warning() -> None:
    page = (REFERENCE / "faq.md").read_text()
    assert messages.PLACE in page
    # Without the tables, a reader of a checkout is led to the list that they are made of.
    (link,) = re.findall(r"\[tests/project/messages\.txt\]\((.*?)\)", page)
    assert (REFERENCE / link).resolve() == FILE
    assert "make docs" in messages.PLACE
    site = messages.with_messages(page)
    assert link not in site
    shown = site.partition("### Settings and consumer")[2]
    listed = list(messages.rows(FILE.read_text()))
    assert len(listed) > 400
    assert [
        row.text for module, row in listed if messages.area_of(module) and messages.code(row.text) not in shown
    ] == []
    assert "or an instance with \\_\\_call\\_\\_ |" in shown
    assert "topic … does not exist, or this client may not see it` | create the topic, or correct topics=… |" in shown


LISTED: Final = """
[lanes_kafka.broker]
  Broker.open
    ConfigError: topic {name!r}: {found} partitions, and this is a text that goes on in
        the next line; use another topic
          found = «no» if not partitions else «{partitions}»
    for stop(text): {option} is «wrong» if bad else «odd»: pass a number or a name
    returns: not an error alone
"""


def test_a_listed_message_is_divided_into_text_and_remedy() -> None:
    assert list(messages.rows(LISTED)) == [
        (
            "lanes_kafka.broker",
            messages.Row(
                "`ConfigError`",
                "topic …: … partitions, and this is a text that goes on in the next line",
                "use another topic",
            ),
        ),
        ("lanes_kafka.broker", messages.Row("command line", "… is wrong", "pass a number or a name")),
    ]


def test_every_exit_status_is_listed() -> None:
    listed = {int(row[0]) for row in rows("cli.md") if row[0].isdigit()}
    assert {value for name, value in vars(process).items() if name.startswith("EXIT_")} <= listed


def test_the_commands_are_shown_in_tables() -> None:
    page = (REFERENCE / "cli.md").read_text()
    assert PLACE in page
    assert "make docs" in PLACE
    shown = with_commands(page)
    assert PLACE not in shown
    assert "### lanes dead-letters replay\n" in shown
    assert "| `--limit NUMBER` | `100; x>=1` |" in shown
    names = re.findall(r"^\| `([^`]+)` \|", shown.partition("### lanes\n")[2], re.MULTILINE)
    assert [name for name in names if not re.match(r"(-{1,2}\w|[A-Z]{2,}|[a-z-]+$)", name)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_public_name_on_a_page_exists(page: Path) -> None:
    text = re.sub(r"^( *`{3,}).*?^\1$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`((?:lanes|memsource)(?:_\w+)?(?:\.\w+)+)\b", text))
    unknown = [name for name in sorted(named - TELEMETRY - FORMATS) if not name.endswith((".py", ".md"))]
    assert [name for name in unknown if not is_there(name)] == []


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of a module."""
    module, _, rest = name.partition(".")
    found: object = importlib.import_module(module)
    path = module
    for part in rest.split("."):
        path = f"{path}.{part}"
        if not hasattr(found, part) and isinstance(found, ModuleType):
            with contextlib.suppress(ImportError):
                importlib.import_module(path)
        if not hasattr(found, part):
            return part in getattr(found, "__annotations__", {})
        found = getattr(found, part)
    return True


def test_a_name_that_the_api_lacks_is_found_on_a_page() -> None:
    assert is_there("lanes.Settings.timeout")
    assert is_there("memsource.contract.leases")
    assert not is_there("lanes_kafka.read_leter")
