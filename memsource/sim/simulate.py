"""``simulate``: a test of the user's handler, run under many plans."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, overload

from memsource.sim.campaign import Campaign, Failure, Report
from memsource.sim.errors import ImpossiblePlan, SimulationFailed
from memsource.sim.faults import FaultBudget
from memsource.sim.plan import PERSONALITIES, PersonalityName, Plan
from memsource.sim.run import Conditions, Run
from memsource.sim.token import decode
from memsource.sim.view import render

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
) -> Simulation | Callable[[Simulated], Simulation]:
    """Make a coroutine function of a ``World`` a test that is run ``runs`` times, each under another plan.

    ``faults``: how many of each kind a run may have, none by default: see ``memsource.faults``. ``personalities``: the
    brokers, in turn. ``partitions``: how many the topic has. ``threads``: ``"inline"`` runs plain handlers, and what
    goes to a thread by anyio or asyncio, on the loop; ``"refuse"`` refuses them. ``setup``: called before each run, to
    put back what outlives one. ``seed``: of everything that is drawn. ``sometimes``: events and faults that have to
    have happened, see ``Report.happened``.

    Whatever else the test takes (fixtures) is passed on. What it raises is a finding, as is what the checkers find, a
    state (``World.check``) that differs from that of the run without faults, a deadlock, and a message that is not
    handled. The first run that fails is made small, shown, and its token raised in ``SimulationFailed``.
    """

    def decorate(test: Simulated) -> Simulation:
        if not inspect.iscoroutinefunction(test):
            raise ImpossiblePlan(f"simulate({test!r}): must be an async function of a world")

        def campaign(*args: Any, **kwargs: Any) -> Campaign:
            conditions = Conditions(
                test=lambda world: test(world, *args, **kwargs), partitions=partitions, threads=threads, setup=setup
            )
            return Campaign(
                conditions,
                runs=OPTIONS.runs or runs,
                budget=faults,
                personalities=personalities,
                seed=seed,
                sometimes=() if OPTIONS.runs else sometimes,
            )

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

        parameters = list(inspect.signature(test).parameters.values())
        if not parameters:
            raise ImpossiblePlan(f"simulate({test!r}): its first argument is the world, and it has none")
        # A test runner asks for what the test takes: the world is not a fixture.
        made: Any = simulated
        del made.__wrapped__
        made.__signature__ = inspect.Signature(parameters[1:])
        made.campaign = lambda *args, **kwargs: campaign(*args, **kwargs).go()
        made.replay = again
        made.report = None
        made.lanes_simulation = True
        return cast(Simulation, made)

    return decorate if test is None else decorate(test)


def replay(campaign: Campaign, token: str) -> Run:
    """The run that a token stands for. Raises ``TokenRefused`` for one that cannot be replayed here."""
    return campaign.judged(decode(token))


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
