"""Breadth-first search through every order of events, with the shortest path to what goes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple, Protocol, TypeVar

__all__ = ["Broken", "Exploration", "Violation", "World", "search"]

S = TypeVar("S", bound=Hashable)


class Broken(Exception):
    """An invariant does not hold. ``step``: what has just happened, where that is not in the path yet."""

    def __init__(self, invariant: str, text: str, step: str | None = None) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text
        self.step = step


class World(Protocol[S]):
    """What is explored: states as values, and what may happen next in each."""

    def start(self) -> S:
        """Where everything begins."""

    def steps(self, state: S) -> Iterator[tuple[Callable[[], str], S]]:
        """Everything that may happen in ``state``: its text on demand, and the state it leads to.

        Raises ``Broken`` for a step that breaks an invariant, and for a state that does. Pure: the same again each
        time.
        """

    @property
    def reached(self) -> Counter[str]:
        """How often each kind of event and each rare branch was seen so far."""


class Violation(NamedTuple):
    """What broke, why, and the shortest way there."""

    invariant: str
    text: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"{number:3}. {step}" for number, step in enumerate(self.path, 1))
        return f"{self.invariant}: {self.text}\n{steps}"


class Exploration(NamedTuple):
    """What a search has seen. ``depth``: steps to the farthest state. ``complete``: there is nothing else to see."""

    states: int
    steps: int
    depth: int
    reached: Counter[str]
    violation: Violation | None
    complete: bool

    def __str__(self) -> str:
        found = "complete" if self.complete else "cut short"
        return f"{self.states:,} states, {self.steps:,} steps, depth {self.depth}, {found}"


def search(world: World[S], *, max_states: int | None = None) -> Exploration:
    """Visit every state of a world once, nearest first; ends at the first violation.

    ``max_states``: give up behind so many, None = never. Memory: a few hundred bytes a state.
    """
    first = world.start()
    known = {first: 0}
    states = [first]
    parents: list[tuple[int, Callable[[], str]]] = [(-1, str)]
    depths = [0]
    steps = at = 0
    violation = None
    while at < len(states) and violation is None and (max_states is None or len(states) <= max_states):
        try:
            for text, following in world.steps(states[at]):
                steps += 1
                if following not in known:
                    known[following] = len(states)
                    states.append(following)
                    parents.append((at, text))
                    depths.append(depths[at] + 1)
        except Broken as broken:
            path = [] if broken.step is None else [broken.step]
            while parents[at][0] >= 0:
                at, text = parents[at]
                path.append(text())
            violation = Violation(broken.invariant, broken.text, tuple(reversed(path)))
        at += 1
    complete = violation is None and at == len(states)
    return Exploration(len(states), steps, depths[-1], world.reached, violation, complete)
