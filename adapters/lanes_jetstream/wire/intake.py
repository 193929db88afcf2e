"""Computes the subjects that a stream stores: its own, those of copied streams, and the results of transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lanes_jetstream.wire.subjects import covers, matches, narrowed, overlap
from lanes_jetstream.wire.transforms import origins_of, own_transform, stored_pattern


@dataclass(frozen=True, slots=True)
class Intake:
    """The subjects that a stream stores.

    Attributes:
        patterns: Patterns of published subjects by the name of their stream. This stream is the stream itself, the
            stream that it mirrors, or one of its sources.
        stored: Destinations of the transforms that apply last, and patterns of the subjects that no transform changes.
        transforms: Whether the stream changes subjects.
        external: Whether the stream copies a stream of another account or domain, whose subjects are unknown.
    """

    patterns: Mapping[str, Sequence[str]]
    stored: Sequence[str]
    transforms: bool
    external: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Intake:
        """Return the intake of a stream with this configuration."""
        own, origins = own_transform(config), origins_of(config)
        patterns = {str(config["name"]): list(config.get("subjects") or ())}
        stored = set(patterns[str(config["name"])])
        for origin in origins:
            stored.update(each.destination or each.source for each in origin.transforms)
            # The name of an origin in another account or domain may also be the name of another stream here.
            if not origin.external:
                patterns.setdefault(origin.name, []).extend(each.source for each in origin.transforms)
        if own is not None:
            # The stream's own transform applies last, and does not change a subject that it does not match.
            stored = {own.destination, *(each for each in stored if not covers(own.source, stored_pattern(each)))}
        transforms = own is not None or any(each.destination for origin in origins for each in origin.transforms)
        return cls(patterns, sorted(stored), transforms, any(origin.external for origin in origins))

    def stores(self, stream: str, subject: str) -> bool:
        """Return whether this stream stores the messages that clients publish to a subject of the stream ``stream``."""
        return any(matches(each, subject) for each in self.patterns.get(stream, ()))

    def may_store(self, pattern: str) -> bool:
        """Return whether a stored subject may match a pattern. True if the stored subjects are unknown."""
        return self.external or any(overlap(each, pattern) for each in self.subjects)

    def within(self, filters: Sequence[str]) -> list[str]:
        """Return the patterns of the stored subjects that filters select.

        Unknown stored subjects may match any pattern.
        """
        if self.external:
            return sorted(set(filters))
        return sorted({narrowed(each, wanted) for each in self.subjects for wanted in filters if overlap(each, wanted)})

    def made(self, filters: Sequence[str]) -> list[str]:
        """Return the destinations that contain a function, such as ``partition(…)``, and may match a filter."""
        return [
            each
            for each in self.stored
            if stored_pattern(each) != each and any(overlap(stored_pattern(each), wanted) for wanted in filters)
        ]

    @property
    def subjects(self) -> list[str]:
        """The patterns of all stored subjects, for a stream that copies no external stream."""
        return sorted({stored_pattern(each) for each in self.stored})
