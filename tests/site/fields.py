"""A griffe extension that turns a paragraph of parameters into a table with types and defaults.

In the source, each entry of such a paragraph has the form: name in double backticks, colon, text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import griffe

ITEM: Final = re.compile(r"(?:\A|(?<=[.;:)?]\s))``(\w+(?:``(?:, | and )``\w+)*)``:\s")


class Fields(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is None:
            return
        fields = [name for name, member in cls.members.items() if member.is_attribute and not member.is_private]
        made = cls.members.get("__init__")
        arguments = [one.name for one in made.parameters] if isinstance(made, griffe.Function) else []
        if any("dataclass" in str(one.value) for one in cls.decorators):
            _divide(
                cls.docstring, fields, "Args"
            )  # griffe knows the parameters that the decorator makes from the fields
            return
        _divide(cls.docstring, arguments, "Args")
        told = _divide(cls.docstring, [name for name in fields if name not in arguments], "Attributes")
        # The signature shows the other fields.
        untold = [name for name in fields if name not in {*told, *arguments} and _has_type_alone(cls.members[name])]
        if untold:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(f"    {name}: " for name in untold)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            _divide(func.docstring, [one.name for one in func.parameters], "Args")


def _has_type_alone(member: griffe.Object | griffe.Alias) -> bool:
    return isinstance(member, griffe.Attribute) and member.annotation is not None and member.docstring is None


def _divide(docstring: griffe.Docstring, names: list[str], title: str) -> list[str]:
    """Turn each paragraph that begins with one of the names into a table; return the names in the tables."""
    told: list[str] = []
    paragraphs = docstring.value.split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        rows = list(_rows(paragraph, names))
        if rows:
            told += [name for name, _ in rows]
            paragraphs[number] = "\n".join([f"{title}:", *(f"    {name}: {text}" for name, text in rows)])
    docstring.value = "\n\n".join(paragraphs)
    return told


def _rows(paragraph: str, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each name of the paragraph with its text; yield nothing if the paragraph does not begin with a name."""
    items = [(found, re.findall(r"\w+", found[1])) for found in ITEM.finditer(paragraph)]
    items = [(found, [one for one in words if one != "and"]) for found, words in items]
    items = [(found, words) for found, words in items if set(words) <= set(names)]
    if not items or items[0][0].start() != 0:
        return
    ends = [*(found.start() for found, _ in items[1:]), len(paragraph)]
    for (found, words), end in zip(items, ends, strict=True):
        text = " ".join(paragraph[found.end() : end].split())
        yield from ((word, text) for word in words)
