"""Matches subjects with patterns, and compares patterns."""

from __future__ import annotations


def matches(pattern: str, subject: str) -> bool:
    """Return whether a pattern with wildcards matches a subject without wildcards."""
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(found) <= len(wanted):
            return False
        found = found[: len(wanted)]
    return len(wanted) == len(found) and all(one in ("*", other) for one, other in zip(wanted, found, strict=True))


def overlap(one: str, other: str) -> bool:
    """Return whether a subject without wildcards exists that both patterns match."""
    these, those = one.split("."), other.split(".")
    for this, that in zip(these, those, strict=False):
        if ">" in (this, that):
            return True
        if this != that and "*" not in (this, that):
            return False
    return len(these) == len(those)


def narrowed(one: str, other: str) -> str:
    """Return the pattern of all subjects that two overlapping patterns both match."""
    these, those = one.split("."), other.split(".")
    for place, (this, that) in enumerate(zip(these, those, strict=False)):
        if ">" in (this, that):
            return ".".join(those[:place] + (those if this == ">" else these)[place:])
        those[place] = that if this == "*" else this
    return ".".join(those)


def covers(pattern: str, subject: str) -> bool:
    """Return whether ``pattern`` matches every subject that the second pattern, ``subject``, matches."""
    wide, narrow = pattern.split("."), subject.split(".")
    for place, token in enumerate(wide):
        if token == ">":
            return len(narrow) > place
        if place >= len(narrow) or narrow[place] == ">" or (token != "*" and token != narrow[place]):
            return False
    return len(narrow) == len(wide)


def is_subject(subject: object) -> bool:
    """Return whether a value is a subject, which may have wildcards."""
    if not isinstance(subject, str) or any(c.isspace() for c in subject):
        return False
    tokens = subject.split(".")
    return all(tokens) and ">" not in tokens[:-1]
