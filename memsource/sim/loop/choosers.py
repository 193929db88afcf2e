"""The choosers of a ``SimLoop``. A chooser decides which task takes the next step.

A chooser sees only the number of the turn and the numbers of the ready tasks. The answers of a chooser depend only on
its seed or schedule. Each run needs a new chooser.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final, Protocol

from memsource.sim.plans.plan import Schedule

_JUMPS: Final = 0.01
"""Probability that time jumps in a turn in which tasks are ready and time can jump."""


class Chooser(Protocol):
    """Decides which ready task takes a step, and when time jumps. The methods must not block or store ``tasks``."""

    def choose(self, turn: int, tasks: Sequence[int]) -> int:
        """Choose the task that takes the step of a turn.

        Args:
            turn: Number of the turn.
            tasks: Numbers of two or more ready tasks, the longest waiting task first.

        Returns:
            The index of the task, 0 … len(tasks) - 1.
        """

    def jump(self, turn: int) -> bool:
        """Decide whether time jumps to the next timer although tasks are ready, as on a slow processor.

        The loop calls ``jump`` before ``choose``, and only while a task is ready and a timer is due within a second.

        Args:
            turn: Number of the turn.

        Returns:
            Whether time jumps.
        """


class Fifo:
    """Chooses the ready task that has waited longest, and never lets time jump."""

    def choose(self, turn: int, tasks: Sequence[int]) -> int:
        return 0

    def jump(self, turn: int) -> bool:
        return False


class RandomWalk:
    """Chooses each ready task with the same probability. Time jumps with a probability of 1 in 100."""

    def __init__(self, seed: int) -> None:
        self._random: Final = Random(seed)

    def choose(self, turn: int, tasks: Sequence[int]) -> int:
        # randrange draws a varying number of bits and takes five times as long.
        return int(self._random.random() * len(tasks))

    def jump(self, turn: int) -> bool:
        return self._random.random() < _JUMPS


class Sparse:
    """Chooses the ready task that has waited longest, except at the deviations of the schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._deviations: Final = dict(schedule.deviations)
        self._jumps: Final = set(schedule.jumps)

    def at(self, turn: int, index: int) -> None:
        """Choose the task at ``index`` in this turn; 0 = time jumps."""
        if index:
            self._deviations[turn] = index
            self._jumps.discard(turn)
        else:
            self._deviations.pop(turn, None)
            self._jumps.add(turn)

    def choose(self, turn: int, tasks: Sequence[int]) -> int:
        index = self._deviations.get(turn, 0)
        return index if index < len(tasks) else 0

    def jump(self, turn: int) -> bool:
        return turn in self._jumps


class Priorities(RandomWalk):
    """Chooses the ready task with the highest priority. A task keeps its priority until a change.

    The strategy is probabilistic concurrency testing (Burckhardt, Kothari, Musuvathi and Nagarakatte, ASPLOS 2010). At
    a change, the task that would run receives a priority below all others. The strategy finds a bug that needs few
    changes in few tasks more often than a random walk.

    Args:
        seed: Seed of the priorities.
        changes: Number of changes, 0 or more.
        span: Number of choices from the start of the run that contain all changes.
        mix: Probability of a random choice, 0 … 1. Without random choices, a polling task would starve the task whose
            result it waits for.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(self, seed: int, changes: int = 3, *, span: int = 1_000, mix: float = 0.1) -> None:
        if changes < 0 or span < max(1, changes) or not 0 <= mix <= 1:
            raise ValueError(
                f"Priorities(changes={changes}, span={span}, mix={mix}): changes must be 0 or more, "
                "span must be at least changes and at least 1, and mix must be 0 to 1"
            )
        super().__init__(seed)
        self._priorities: Final[dict[int, float]] = {}
        self._changes: Final = frozenset(self._random.sample(range(span), changes))
        self._mix: Final = mix
        self._lowest = 0.0
        self._choices = 0

    def choose(self, turn: int, tasks: Sequence[int]) -> int:
        random, priorities = self._random.random, self._priorities
        best, highest = 0, float("-inf")
        for index, task in enumerate(tasks):
            priority = priorities.get(task)
            if priority is None:
                # Tasks draw their priorities in the order in which they appear, which is the same in each run of a
                # seed.
                priority = priorities[task] = random()
            if priority > highest:
                best, highest = index, priority
        changing = self._choices in self._changes
        self._choices += 1
        if changing:
            self._lowest -= 1.0
            priorities[tasks[best]] = self._lowest
            return self.choose(turn, tasks)
        return super().choose(turn, tasks) if random() < self._mix else best


class Recording:
    """Delegates to an ``inner`` chooser and records its choices. ``Sparse(recording.schedule)`` repeats the run."""

    def __init__(self, inner: Chooser) -> None:
        self._inner: Final = inner
        self._deviations: Final[list[tuple[int, int]]] = []
        self._jumps: Final[list[int]] = []

    @property
    def schedule(self) -> Schedule:
        """The recorded schedule: deviations from first in, first out, and jumps of time."""
        return Schedule(tuple(self._deviations), tuple(self._jumps))

    def choose(self, turn: int, tasks: Sequence[int]) -> int:
        index = self._inner.choose(turn, tasks)
        if index:
            self._deviations.append((turn, index))
        return index

    def jump(self, turn: int) -> bool:
        jumps = self._inner.jump(turn)
        if jumps:
            self._jumps.append(turn)
        return jumps


def mixed(seed: int) -> Chooser:
    """Make the chooser of a seed: ``RandomWalk`` for two of three seeds, else ``Priorities``.

    No strategy finds every bug, so a campaign over many seeds uses both strategies.
    """
    return Priorities(seed, changes=seed // 3 % 5) if seed % 3 == 2 else RandomWalk(seed)
