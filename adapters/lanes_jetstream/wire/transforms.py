"""Subject transforms of a stream: the tokens of their destination, and the published subject of a stored subject."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_FUNCTION: Final = re.compile(r"\{\{\s*([A-Za-z]+)\s*(?:\(([^)]*)\))?\s*\}\}")
_DOLLAR: Final = re.compile(r"\$(\d+)")
_DOTS: Final = re.compile(r"\.(?![^{]*\}\})")
"""The dots between tokens, without the dots inside a function."""


def destination_tokens(destination: str) -> list[str]:
    """Split the destination of a transform at its dots."""
    return _DOTS.split(destination)


def function_of(token: str) -> tuple[str, list[int]]:
    """Return the name, in lower case, and the numeric arguments of the function in a destination token."""
    match = _FUNCTION.fullmatch(token)
    if match is None:
        return ("wildcard", [int(token[1:])]) if _DOLLAR.fullmatch(token) else ("", [])
    arguments = [argument.strip() for argument in (match[2] or "").split(",")]
    return match[1].lower(), [int(a) for a in arguments if a.isascii() and a.isdigit()]


def transforms_of(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield source and destination of each transform of a stream, those of its origins included."""
    origins = [*(config.get("sources") or []), *([config["mirror"]] if config.get("mirror") else [])]
    own = config.get("subject_transform")
    pairs = [pair for origin in origins for pair in origin.get("subject_transforms") or []]
    for pair in [*pairs, *([own] if own else [])]:
        if pair.get("dest"):
            yield pair.get("src") or ">", pair["dest"]


def published_subject(stored: str, source: str, destination: str) -> str | None:
    """Undo a transform.

    Args:
        stored: Subject of a stored message.
        source: Pattern of the published subjects.
        destination: Pattern of the stored subjects.

    Returns:
        The subject as published. None if the transform does not make such a subject, or does not store each wildcard.
    """
    pattern, found = destination_tokens(destination), stored.split(".")
    rest: list[str] = []
    if pattern[-1] == ">":
        pattern.pop()
        found, rest = found[: len(pattern)], found[len(pattern) :]
    if len(found) != len(pattern):
        return None
    wildcards: dict[int, str] = {}
    for token, text in zip(pattern, found, strict=True):
        name, arguments = function_of(token)
        if name == "wildcard" and arguments:
            if wildcards.setdefault(arguments[0], text) != text:
                return None
        elif not (text.isdecimal() if name == "partition" else text == token):
            return None
    return _filled(source, wildcards, rest)


def _filled(source: str, wildcards: Mapping[int, str], rest: list[str]) -> str | None:
    """Put texts in the place of the wildcards; None if a text is missing or left over."""
    published: list[str] = []
    number = 0
    *_, last = tokens = source.split(".")
    if (last == ">") != bool(rest):
        return None
    for token in tokens:
        if token == ">":
            published += rest
        elif token == "*":
            number += 1
            if number not in wildcards:
                return None
            published.append(wildcards[number])
        else:
            published.append(token)
    return ".".join(published)
