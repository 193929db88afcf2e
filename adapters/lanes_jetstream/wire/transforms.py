"""Reads the subject transforms of a stream, and computes the subject before a transform."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from lanes_jetstream.wire.subjects import matches

_FUNCTION: Final = re.compile(r"\{\{\s*([A-Za-z]+)\s*(?:\(([^)]*)\))?\s*\}\}")
_DOLLAR: Final = re.compile(r"\$(\d+)")
_DOTS: Final = re.compile(r"\.(?![^{]*\}\})")
"""Pattern of the dots between tokens, without the dots inside a function."""


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


def wildcard_of(token: str) -> int | None:
    """Return the number of the source wildcard that a destination token copies; None for any other token."""
    name, arguments = function_of(token)
    return arguments[0] if name == "wildcard" and arguments else None


class Transform(NamedTuple):
    """A subject transform with the pattern of the original subjects and the destination; "" = unchanged subjects."""

    source: str
    destination: str


class Origin(NamedTuple):
    """A stream that the server copies into another stream, as a source or as the mirrored stream.

    Attributes:
        name: Name of the copied stream.
        external: Whether the copied stream is in another account or domain.
        transforms: Transforms of the copy. The server does not copy a subject that no transform matches.
    """

    name: str
    external: bool
    transforms: Sequence[Transform]

    def copies(self, subject: str) -> bool:
        """Return whether the server copies messages of this subject."""
        return any(matches(each.source, subject) for each in self.transforms)

    def subjects_before(self, copied: str) -> list[str]:
        """Return the subjects of the copied stream that the transforms may have changed to this subject."""
        before = [
            published_subject(copied, *each) if each.destination else copied if matches(each.source, copied) else None
            for each in self.transforms
        ]
        return list(dict.fromkeys(filter(None, before)))


def origins_of(config: Mapping[str, Any]) -> list[Origin]:
    """Return the streams that the server copies into a stream."""
    fields = [*(config.get("sources") or []), *([config["mirror"]] if config.get("mirror") else [])]
    return [
        Origin(
            str(each.get("name")),
            bool(each.get("external")),
            [_transform(pair) for pair in each.get("subject_transforms") or []]
            or [Transform(each.get("filter_subject") or ">", "")],
        )
        for each in fields
    ]


def own_transform(config: Mapping[str, Any]) -> Transform | None:
    """Return the transform of all messages that a stream stores; None = the stream has no such transform."""
    own = config.get("subject_transform") or {}
    return _transform(own) if own.get("dest") else None


def _transform(fields: Mapping[str, Any]) -> Transform:
    return Transform(fields.get("src") or ">", fields.get("dest") or "")


def known_tokens(destination: str) -> list[str]:
    """Return the tokens of a destination, with ``>`` in place of all tokens of unknown index.

    A function other than ``wildcard`` and ``partition`` may split one token into several tokens.
    """
    tokens = destination_tokens(destination)
    for place, token in enumerate(tokens):
        if function_of(token)[0] not in ("", "wildcard", "partition"):
            return [*tokens[:place], ">"]
    return tokens


def partition_numbers(destination: str) -> list[int]:
    """Return the indices of the tokens that contain the number of a partition."""
    return [place for place, token in enumerate(known_tokens(destination)) if function_of(token)[0] == "partition"]


def stored_pattern(destination: str) -> str:
    """Return the pattern of the subjects that a transform makes. A subject without functions is its own pattern."""
    return ".".join("*" if function_of(token)[0] else token for token in known_tokens(destination))


def may_make(stored: str, destination: str) -> bool:
    """Return whether a transform to this destination could make a subject."""
    return matches(stored_pattern(destination), stored)


def published_subject(stored: str, source: str, destination: str) -> str | None:
    """Undo a transform.

    Args:
        stored: Subject of a stored message.
        source: Pattern of the published subjects.
        destination: Pattern of the stored subjects.

    Returns:
        The published subject; None if the transform cannot make ``stored``, or if ``destination`` omits a wildcard of
        ``source`` or has a function other than ``wildcard`` and ``partition``.
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
    """Return a pattern with texts in place of wildcards; None = a text is missing, or ``rest`` does not fit ``>``."""
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
