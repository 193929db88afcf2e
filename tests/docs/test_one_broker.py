"""The pages can be followed on one broker: they create nothing twice and share no group, durable or cohort."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest

from tests.docs.test_docs import PAGES, SHELLS, Block, blocks_of, name_of

MEMBERSHIP: Final = re.compile(r"(?:--group |group\.id=)([\w-]+)")


class Made(NamedTuple):
    """A stream or topic that a page creates, and how."""

    kind: str
    name: str
    how: str


class Used(NamedTuple):
    """A group, durable or cohort of a page."""

    kind: str
    name: str


def names_in(block: Block) -> Iterator[Made | Used]:
    """Yield the names that a block creates, and the members as which the block reads. Only a block that runs counts."""
    if "no-run" in block.words or "cluster" in block.words:
        return
    if block.language in SHELLS:
        yield from (Used("group", name) for name in MEMBERSHIP.findall(block.text))
    if block.language != "python":
        return
    tree = ast.parse(block.text)
    divided = "; ".join(ast.unparse(call) for call in calls(tree, "SubjectTransform"))
    for call in calls(tree, "NewTopic"):
        name, *rest = map(ast.unparse, call.args)
        if isinstance(call.args[0], ast.Constant):  # else it is a partition of a queue, whose page has its own names
            yield Made("topic", ast.literal_eval(name), ", ".join(rest))
    for call in [*calls(tree, "add_stream"), *calls(tree, "StreamConfig")]:
        how = {each.arg: ast.unparse(each.value) for each in call.keywords}
        given = how.pop("name", ast.unparse(call.args[0]) if call.args else "None")
        if given.startswith(("'", '"')):  # else it is the StreamConfig, which is looked at itself
            yield Made("stream", ast.literal_eval(given), f"{how['subjects']} {divided}".strip())
    for call in calls(tree, "JetStreamSource"):
        yield from (Used("durable", ast.literal_eval(each.value)) for each in call.keywords if each.arg == "durable")
    yield from (Used("cohort", ast.literal_eval(call.args[0])) for call in calls(tree, "Cohort"))
    for each in ast.walk(tree):
        if isinstance(each, ast.Dict):
            pairs = [
                (key.value, value)
                for key, value in zip(each.keys, each.values, strict=True)
                if isinstance(key, ast.Constant)
            ]
            yield from (Used("group", ast.literal_eval(value)) for key, value in pairs if key == "group.id")


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    found = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    return [each for each in found if ast.unparse(each.func).rpartition(".")[2] == name]


def conflicts(pages: dict[str, str]) -> list[str]:
    """Each name that keeps a reader of all these pages from following them on one broker."""
    found: dict[Made | Used, set[str]] = defaultdict(set)
    for page, text in pages.items():
        for block in blocks_of(page, text):
            for name in names_in(block):
                found[name].add(page)
    made = [each for each in found if isinstance(each, Made)]
    faults = [
        f"{each.kind} {each.name} is used by {', '.join(sorted(pages))}"
        for each, pages in found.items()
        if len(pages) > 1 and (isinstance(each, Used) or each.kind == "topic")
    ]
    for each in made:
        for other in made[: made.index(each)]:
            if (each.kind, each.name) == (other.kind, other.name):
                faults.append(f"{each.kind} {each.name} is created in two ways: {other.how}; {each.how}")
            elif each.kind == other.kind == "stream" and first_tokens(each.how) & first_tokens(other.how):
                faults.append(f"streams {other.name} and {each.name} take the same subjects")
    return faults


def first_tokens(how: str) -> set[str]:
    return set(re.findall(r"'([\w-]+)[.']", how.partition("]")[0]))


def test_no_two_pages_use_the_same_topic_stream_group_or_cohort() -> None:
    texts = {name_of(page): page.read_text() for page in PAGES}
    assert conflicts(texts) == []
    found = [name for page, text in texts.items() for block in blocks_of(page, text) for name in names_in(block)]
    assert {each.kind for each in found} == {"topic", "stream", "group", "durable", "cohort"}


TOPIC: Final = 'NewTopic("orders", 4, 1)'
STREAM: Final = 'js.add_stream(name="ORDERS", subjects=["orders.*"])'


@pytest.mark.parametrize(
    ("one", "two", "fault"),
    [
        (TOPIC, TOPIC, "topic orders is used by one.md, two.md"),
        (TOPIC, TOPIC.replace("4", "8"), "topic orders is created in two ways: 4, 1; 8, 1"),
        (STREAM, STREAM, None),
        (
            STREAM,
            STREAM.replace("orders.*", "sold.*"),
            "stream ORDERS is created in two ways: ['orders.*']; ['sold.*']",
        ),
        (STREAM, STREAM.replace("ORDERS", "SOLD"), "streams ORDERS and SOLD take the same subjects"),
        (
            STREAM,
            'SubjectTransform("a"), js.add_stream(StreamConfig("ORDERS", subjects=["orders.*"]))',
            "stream ORDERS is created in two ways: ['orders.*']; ['orders.*'] SubjectTransform('a')",
        ),
        ('{"group.id": "billing"}', '{"group.id": "billing"}', "group billing is used by one.md, two.md"),
        ('JetStreamSource("", durable="d")', 'JetStreamSource("", durable="d")', "durable d is used by one.md, two.md"),
        ('Cohort("c")', 'Cohort("c", weight=2)', "cohort c is used by one.md, two.md"),
        ('Cohort("c")', '{"group.id": "c"}', None),
    ],
)
def test_a_topic_that_two_pages_use_is_found(one: str, two: str, fault: str | None) -> None:
    pages = {f"{name}.md": f"```python\n{text}\n```\n" for name, text in (("one", one), ("two", two))}
    assert conflicts(pages) == ([] if fault is None else [fault])


def test_a_group_that_a_command_names_counts_as_used() -> None:
    pages = {"one.md": "```sh\nlanes doctor kafka --group a\n```\n", "two.md": '```python\n{"group.id": "a"}\n```\n'}
    assert conflicts(pages) == ["group a is used by one.md, two.md"]
