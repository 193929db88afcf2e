"""Where the brokers in memory keep dead letters."""

from __future__ import annotations

from lanes.dead_letter import DeadLetter

__all__ = ["KeepsLetters"]


class KeepsLetters:
    """Dead letters by their id, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._letters: dict[str, DeadLetter] = {}

    def write_letter(self, letter: DeadLetter) -> None:
        """Keep a dead letter; one whose id is known already is dropped."""
        self._letters.setdefault(letter.id, letter)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The dead letters, in order."""
        return list(self._letters.values())
