"""Where the brokers in memory keep dead letters."""

from __future__ import annotations

from lanes.dead_letter import DeadLetter

__all__ = ["KeepsDeadLetters"]


class KeepsDeadLetters:
    """A broker that keeps dead letters by their id, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._dead_letters: dict[str, DeadLetter] = {}

    def write_dead_letter(self, dead_letter: DeadLetter) -> None:
        """Keep a dead letter; one whose id is known already is dropped."""
        self._dead_letters.setdefault(dead_letter.id, dead_letter)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The dead letters, in order."""
        return list(self._dead_letters.values())
