"""``simulate``: a test of the user's handler, run under many plans."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, Protocol, cast, overload

from lanes.arguments import names_wrong_calls
from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.errors import ImpossiblePlan, SimulationError, SimulationFailed, cause_of, users_frames
from memsource.sim.plans.faults import FaultBudget
from memsource.sim.plans.plan import Plan
from memsource.sim.plans.token import decode
from memsource.sim.runs.campaign import Campaign, CampaignReport, Failure
from memsource.sim.runs.run import TIME_LIMIT, Conditions, Run, found
from memsource.sim.runs.view import counted, render


@dataclass
class Options:
    """Options of the command line.

    Attributes:
        runs: Number of runs of each test; None = the number that the test sets.
        replay: Token of the only run; None = run a campaign.
        test: Id by which pytest selects the running test; None = pytest runs no simulated test.
    """

    runs: int | None = None
    replay: str | None = None
    test: str | None = None


OPTIONS = Options()
"""The options in force in this process."""


class Simulation(Protocol):
    """A simulated test, made by ``simulate``. A call of the test runs the campaign, or the run of ``--lanes-replay``.

    Attributes:
        lanes_simulation: True. The pytest plugin finds a simulated test by this attribute, without an import.
        report: Figures of the last campaign, also after a failure; None = no campaign began, or the last call ran the
            run of ``--lanes-replay``. A call and ``campaign`` both set the figures.
    """

    lanes_simulation: bool
    report: CampaignReport | None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the campaign or the replayed run, and raise ``SimulationFailed`` for a failure.

        The test receives the arguments after its world.
        """

    def campaign(self, *args: Any, **kwargs: Any) -> CampaignReport:
        """Run the campaign.

        Args:
            *args: Positional arguments of the test after its world.
            **kwargs: Keyword arguments of the test.

        Returns:
            The report, also after a failure. ``report`` has the same object.
        """

    def replay(self, token: str, *args: Any, **kwargs: Any) -> Run:
        """Make the run that a token describes.

        Args:
            token: Token of a failing run.
            *args: Positional arguments of the test after its world.
            **kwargs: Keyword arguments of the test.

        Returns:
            The run that the token describes.

        Raises:
            TokenRefused: The token is invalid, damaged, or of another version of lanes or minor version of Python.
        """


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


@names_wrong_calls("memsource.simulate", ImpossiblePlan)
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
    """Turn a coroutine function with a ``World`` parameter into a test that runs under many plans.

    The world is the first parameter, after the ``self`` of a method. A call passes the other arguments, such as
    fixtures, to the test.

    An exception of the test or a worker, a finding of a checker, or an unfinished message fails a run. A deadlock, a
    livelock, a test beyond ``time_limit`` and a worker that does not stop also fail the run. A state (``World.check``)
    that differs from the state of the run without faults also fails the run. Ctrl-C and ``pytest.skip`` end the test as
    usual. A call of the test shrinks the first failing run, and raises ``SimulationFailed`` with a picture and the
    token of the smallest failing run.

    Args:
        test: The test. Pass options by name.
        runs: Number of runs.
        faults: Maximum number of faults of each kind in a run; see ``memsource.faults``. Default: no faults.
        personalities: The brokers; the runs use them in turn.
        partitions: Number of partitions of the topic.
        threads: ``"inline"`` runs plain handlers, and functions for a thread of anyio or asyncio, on the loop.
            With ``"refuse"``, a call that needs a thread ends the run with ``Refused``.
        setup: Plain function to call before each run, which resets state that outlives a run.
        seed: Seed of all draws.
        sometimes: Required events and faults, each of which must happen in at least one run; see
            ``CampaignReport.happened``.
        time_limit: Maximum duration of the test, in virtual seconds. Default: a day.

    Returns:
        The simulated test; without ``test``, a decorator that makes the test.

    Raises:
        ImpossiblePlan: An argument is out of its range, or the test cannot be simulated. A call of the test also raises
            this error if the test publishes messages and does not await ``World.settled`` after them.
    """
    __tracebackhide__ = True  # pytest shows the refused argument, not this frame

    def decorate(test: Simulated) -> Simulation:
        __tracebackhide__ = True
        try:
            if not inspect.iscoroutinefunction(test):
                named = getattr(test, "__name__", test)
                raise ImpossiblePlan(f"simulate({named}): must be an async function of a world; pass options by name")
            place = _place_of_world(test)
            conditions = Conditions(
                test=test,
                partitions=partitions,
                threads=threads,
                setup=setup,
                time_limit=time_limit,
                settles=True,
            )
            make = functools.partial(Campaign, budget=faults, personalities=personalities, seed=seed)
            # Refuse impossible arguments before the first run.
            make(conditions, runs=runs, sometimes=sometimes)
        except ImpossiblePlan as error:
            raise error.with_traceback(users_frames(error.__traceback__))  # noqa: B904 - the same exception

        def campaign(*args: Any, **kwargs: Any) -> Campaign:
            if len(args) < place:
                raise ImpossiblePlan(f"{test.__qualname__} is a method: also pass the object of the method")
            whole = replace(conditions, test=lambda world: test(*args[:place], world, *args[place:], **kwargs))
            return make(whole, runs=OPTIONS.runs or runs, sometimes=() if OPTIONS.runs else sometimes)

        def go(*args: Any, **kwargs: Any) -> CampaignReport:
            made.report = None
            whole = campaign(*args, **kwargs)
            made.report = whole.report
            return whole.go()

        def again(token: str, *args: Any, **kwargs: Any) -> Run:
            return campaign(*args, **kwargs).judged(decode(token))

        @functools.wraps(test)
        def simulated(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True  # pytest shows the finding, not this frame
            made.report = None
            run: Run | None = None
            failure: Failure | None = None
            try:
                _check_caller(test, sys._getframe(1))
                if OPTIONS.replay is not None:
                    run = again(OPTIONS.replay, *args, **kwargs)
                else:
                    failure = go(*args, **kwargs).failure
            except SimulationError as error:
                raise error.with_traceback(users_frames(error.__traceback__))  # noqa: B904 - the same exception
            if failure is not None:
                explained = _explained(failure, _replayed_by(test, failure.token))
                raise SimulationFailed(explained) from cause_of(failure.run.causes)
            if run is not None and run.findings:
                shown = _shown(run, _replayed_by(test, str(OPTIONS.replay)))
                raise SimulationFailed(shown) from cause_of(run.causes)

        # A test runner treats parameters as fixtures, but the world is no fixture.
        parameters = list(inspect.signature(test).parameters.values())
        made: Any = simulated
        del made.__wrapped__
        made.__signature__ = inspect.Signature(parameters[:place] + parameters[place + 1 :])
        made.campaign = go
        made.replay = again
        made.report = None
        made.lanes_simulation = True
        return cast(Simulation, made)

    return decorate if test is None else decorate(test)


def _place_of_world(test: Simulated) -> int:
    """Return the index of the world among the test's parameters. The index is 0, or 1 for a method.

    Raises:
        ImpossiblePlan: The test has no parameter for the world at this index.
    """
    parameters = list(inspect.signature(test).parameters.values())
    place = int(bool(parameters) and parameters[0].name in _OWNERS)
    name = getattr(test, "__qualname__", repr(test))
    if len(parameters) <= place or parameters[place].kind not in _BY_POSITION:
        takes = ", ".join(map(str, parameters)) or "empty"
        raise ImpossiblePlan(f"simulate({name}): its first parameter must be the world, but its parameters are {takes}")
    first = parameters[place]
    if not _is_world(first) and any(map(_is_world, parameters)):
        raise ImpossiblePlan(
            f"simulate({name}): {first.name!r} precedes the world; make the world the first parameter, and put "
            "fixtures after the world"
        )
    return place


def _check_caller(test: Simulated, caller: FrameType) -> None:
    """Raise ``ImpossiblePlan`` if the caller's line passes the call's result to a function such as ``asyncio.run``.

    The call makes all runs and returns None, so ``asyncio.run`` would fail after the runs.
    """
    name = getattr(test, "__name__", "")
    line = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
    found = re.search(rf"\b((?:asyncio|anyio|trio)\.run)\(\s*(?:[\w.()]*\.)?{re.escape(name)}\(", line)
    if name and found is not None:
        raise ImpossiblePlan(
            f"{name} is a simulated test, whose call makes the runs and returns no coroutine: write {name}() without "
            f"{found[1]}"
        )


def _is_world(parameter: inspect.Parameter) -> bool:
    kind = parameter.annotation
    named = kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", "")
    return parameter.name == "world" or named == "World"


def _replayed_by(test: Simulated, token: str) -> str:
    """Return the command that repeats the run of a token in this test alone."""
    name = OPTIONS.test or _pytest_id(test)
    return " ".join(["pytest", "--lanes-replay", token, *([] if name is None else [shlex.quote(name)])])


def _pytest_id(test: Simulated) -> str | None:
    """Return the id by which pytest would select the test; None = pytest cannot find the test."""
    code = getattr(test, "__code__", None)
    if code is None or "<" in test.__qualname__ or code.co_filename.startswith("<"):
        return None
    file = Path(code.co_filename)
    with contextlib.suppress(ValueError):
        file = file.relative_to(Path.cwd())
    return f"{file.as_posix()}::{test.__qualname__.replace('.', '::')}"


def _explained(failure: Failure, command: str) -> str:
    first, last = failure.first.plan, failure.run.plan
    orders = (
        f"\n\nWithout faults, {failure.orders} other orders of the steps did not have this failure."
        if failure.orders
        else ""
    )
    return (
        f"{_shown(failure.run, command)}\n\nMade small in {failure.attempts} runs, from {_sized(first)} to "
        f"{_sized(last)}.{orders}"
    )


def _shown(run: Run, command: str) -> str:
    faults = "".join(f"\n  {fault.kind} at boundary {fault.at}" for fault in run.plan.faults)
    return (
        f"{found(run.findings, run.plan.personality)}\n\nfaults:{faults or ' none'}\n\n"
        f"{render(run)}\n\nreplay: {command}"
    )


def _sized(plan: Plan) -> str:
    limit = "all messages" if plan.limit is None else f"at most {counted(plan.limit, 'message')}"
    return f"{counted(len(plan.faults), 'fault')} and {counted(len(plan.schedule), 'deviation')} with {limit}"
