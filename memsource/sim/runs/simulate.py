"""``simulate``: a test of the user's handler, run under many plans."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, cast, overload

from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.errors import ImpossiblePlan, SimulationFailed
from memsource.sim.plans.faults import FaultBudget
from memsource.sim.plans.plan import Plan
from memsource.sim.plans.token import decode
from memsource.sim.runs.campaign import Campaign, Failure, Report
from memsource.sim.runs.run import TIME_LIMIT, Conditions, Run, Test
from memsource.sim.runs.view import render

__all__ = ["OPTIONS", "Options", "Simulation", "replay", "simulate"]


@dataclass
class Options:
    """What the command line of a test run says. ``runs``: instead of what the test asks for; ``replay``: a token, and
    nothing else is run."""

    runs: int | None = None
    replay: str | None = None


OPTIONS = Options()
"""Those in force, in this process."""


class Simulation(Protocol):
    """What ``simulate`` makes of a test. Calling it runs the campaign; raises ``SimulationFailed`` when a run fails.

    ``report``: of the campaign that the last call made, as far as it came; None = there was no call, or it was a
    replay. ``lanes_simulation`` is True: by it the pytest plugin knows such a test without importing anything.
    """

    lanes_simulation: bool
    report: Report | None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run it, with what the test takes beside its world."""

    def campaign(self, *args: Any, **kwargs: Any) -> Report:
        """Run it and return what it was, failed or not."""

    def replay(self, token: str, *args: Any, **kwargs: Any) -> Run:
        """Run one plan; see ``replay``."""


_OWNERS: Final = ("self", "cls")
_BY_POSITION: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

Simulated = Callable[..., Awaitable[None]]


@overload
def simulate(test: Simulated, /) -> Simulation: ...


@overload
def simulate(
    *,
    runs: int = 200,
    faults: FaultBudget | None = None,
    personalities: Sequence[PersonalityName] = PERSONALITIES,
    partitions: int = 4,
    threads: Literal["refuse", "inline"] = "refuse",
    setup: Callable[[], object] | None = None,
    seed: int = 0,
    sometimes: Sequence[str] = (),
    time_limit: float = TIME_LIMIT,
) -> Callable[[Simulated], Simulation]: ...


def simulate(
    test: Simulated | None = None,
    /,
    *,
    runs: int = 200,
    faults: FaultBudget | None = None,
    personalities: Sequence[PersonalityName] = PERSONALITIES,
    partitions: int = 4,
    threads: Literal["refuse", "inline"] = "refuse",
    setup: Callable[[], object] | None = None,
    seed: int = 0,
    sometimes: Sequence[str] = (),
    time_limit: float = TIME_LIMIT,
) -> Simulation | Callable[[Simulated], Simulation]:
    """Make a coroutine function of a ``World`` a test that is run ``runs`` times, each under another plan.

    ``faults``: how many of each kind a run may have, none by default: see ``memsource.faults``. ``personalities``: the
    brokers, in turn. ``partitions``: how many the topic has. ``threads``: ``"inline"`` runs plain handlers, and what
    goes to a thread by anyio or asyncio, on the loop; ``"refuse"`` refuses them. ``setup``: called before each run, to
    put back what outlives one. ``seed``: of everything that is drawn. ``sometimes``: events and faults that have to
    have happened, see ``Report.happened``. ``time_limit``: virtual seconds that the test may take, a day by default.

    The world is the first parameter, behind the ``self`` of a method; whatever else the test takes (fixtures) is passed
    on. Raises ``ImpossiblePlan`` for what cannot be simulated.

    What the test raises is a finding (what ``pytest.fail`` raises too), as is what the checkers find, a state
    (``World.check``) that differs from that of the run without faults, a deadlock, and a message that is not handled.
    Ctrl-C and ``pytest.skip`` end it as ever. The first run that fails is made small, shown, and its token raised in
    ``SimulationFailed``.
    """

    def decorate(test: Simulated) -> Simulation:
        if not inspect.iscoroutinefunction(test):
            raise ImpossiblePlan(f"simulate({test!r}): must be an async function of a world; options go by their names")
        place = _place_of_world(test)

        def campaign(*args: Any, **kwargs: Any) -> Campaign:
            if len(args) < place:
                raise ImpossiblePlan(f"{test.__qualname__} is a method: pass the object it is called on, too")
            return made_of(
                lambda world: test(*args[:place], world, *args[place:], **kwargs),
                OPTIONS.runs or runs,
                () if OPTIONS.runs else sometimes,
            )

        def made_of(whole: Test, runs: int, sometimes: Sequence[str]) -> Campaign:
            conditions = Conditions(
                test=whole, partitions=partitions, threads=threads, setup=setup, time_limit=time_limit
            )
            return Campaign(
                conditions, runs=runs, budget=faults, personalities=personalities, seed=seed, sometimes=sometimes
            )

        # What cannot be is refused here, and not when it is run.
        made_of(test, runs, sometimes)

        def again(token: str, *args: Any, **kwargs: Any) -> Run:
            return replay(campaign(*args, **kwargs), token)

        @functools.wraps(test)
        def simulated(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True  # pytest shows what was found, not where it is raised
            made.report = None
            if OPTIONS.replay is not None:
                run = again(OPTIONS.replay, *args, **kwargs)
                if run.findings:
                    raise SimulationFailed(_shown(run, OPTIONS.replay)) from next(iter(run.causes), None)
                return
            whole = campaign(*args, **kwargs)
            made.report = whole.report
            failure = whole.go().failure
            if failure is not None:
                raise SimulationFailed(_explained(failure)) from next(iter(failure.run.causes), None)

        # A test runner asks for what the test takes: the world is not a fixture.
        parameters = list(inspect.signature(test).parameters.values())
        made: Any = simulated
        del made.__wrapped__
        made.__signature__ = inspect.Signature(parameters[:place] + parameters[place + 1 :])
        made.campaign = lambda *args, **kwargs: campaign(*args, **kwargs).go()
        made.replay = again
        made.report = None
        made.lanes_simulation = True
        return cast(Simulation, made)

    return decorate if test is None else decorate(test)


def replay(campaign: Campaign, token: str) -> Run:
    """The run that a token stands for. Raises ``TokenRefused`` for one that cannot be replayed here."""
    return campaign.judged(decode(token))


def _place_of_world(test: Simulated) -> int:
    """Which of the test's parameters the world is: the first one, or the second one of a method.

    Raises ``ImpossiblePlan`` where it is not.
    """
    parameters = list(inspect.signature(test).parameters.values())
    place = int(bool(parameters) and parameters[0].name in _OWNERS)
    name = getattr(test, "__qualname__", repr(test))
    if len(parameters) <= place or parameters[place].kind not in _BY_POSITION:
        takes = ", ".join(map(str, parameters)) or "nothing"
        raise ImpossiblePlan(f"simulate({name}): its first parameter must be the world, and it takes {takes}")
    first = parameters[place]
    if not _is_world(first) and any(map(_is_world, parameters)):
        raise ImpossiblePlan(
            f"simulate({name}): {first.name!r} comes before the world; the world is the first parameter, and what the "
            "test runner passes comes behind it"
        )
    return place


def _is_world(parameter: inspect.Parameter) -> bool:
    kind = parameter.annotation
    named = kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", "")
    return parameter.name == "world" or named == "World"


def _explained(failure: Failure) -> str:
    first, last = failure.first.plan, failure.run.plan
    return (
        f"{_shown(failure.run, failure.token)}\n\nMade small in {failure.attempts} runs, from {_sized(first)} to "
        f"{_sized(last)}."
    )


def _shown(run: Run, token: str) -> str:
    found = "\n".join(f"  {name}: {what}" for name, what in run.findings.items())
    faults = "".join(f"\n  {fault.kind} at boundary {fault.at}" for fault in run.plan.faults)
    return (
        f"{len(run.findings)} found, on {run.plan.personality}:\n{found}\n\nfaults:{faults or ' none'}\n\n"
        f"{render(run)}\n\nreplay: pytest --lanes-replay {token}"
    )


def _sized(plan: Plan) -> str:
    limit = "all messages" if plan.limit is None else f"at most {_counted(plan.limit, 'message')}"
    return f"{_counted(len(plan.faults), 'fault')} and {_counted(len(plan.schedule), 'deviation')} with {limit}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
