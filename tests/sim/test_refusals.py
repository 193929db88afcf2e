"""Bad use of ``simulate`` is refused at once, by name and with the remedy, and leaves nothing behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from lanes import Message
from memsource.sim import virtual
from memsource.sim.errors import ImpossiblePlan, NeverYields, Refused
from memsource.sim.simulate import Simulation, simulate
from memsource.sim.world import World


def simulated(body: Callable[[], object]) -> Simulation:
    """A handler that calls ``body``."""

    @simulate(runs=3)
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            body()

        world.produce("orders", n=2)
        world.workers(1, handle)
        await world.settled()

    return test


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda: time.sleep(1), r"^time\.sleep, called at .*test_refusals\.py.*await anyio\.sleep"),
        (lambda: threading.Thread(target=print).start(), r'^threading\.Thread\.start.*threads="inline"'),
        (lambda: socket.socket(), r"^socket\.socket.*answers from memory"),
        (lambda: subprocess.run(["true"], check=True), r"^subprocess\.Popen.*give the handler a function"),
        (lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL), r"^signal\.signal.*call what the signal's handler"),
    ],
    ids=["sleep", "thread", "socket", "subprocess", "signal"],
)
def test_what_has_no_virtual_time_is_refused(body: Callable[[], object], says: str) -> None:
    with pytest.raises(Refused, match=says):
        simulated(body)()


def test_a_refusal_cannot_be_swallowed() -> None:
    def swallows() -> None:
        try:
            time.sleep(1)
        except Exception:
            pass

    with pytest.raises(Refused, match=r"time\.sleep"):
        simulated(swallows)()


def test_a_handler_that_never_yields_ends_the_campaign_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = virtual.run
    runs = []

    def impatient(*args: object, **options: object) -> object:
        runs.append(1)
        return run(*args, step_limit=0.3, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("memsource.sim.run.run", impatient)

    def spins() -> None:
        while True:
            pass

    with pytest.raises(NeverYields, match=r"'w-1' does not yield: turn \d+, at .*test_refusals\.py:\d+ in spins"):
        simulated(spins)()
    # It is not made small: each run would take as long.
    assert len(runs) == 1


def test_a_plain_handler_is_refused_not_found_guilty() -> None:
    @simulate(runs=3)
    async def test(world: World) -> None:
        world.workers(1, lambda message: None)

    with pytest.raises(Refused, match="is a plain function, which runs in threads"):
        test()


def test_what_a_world_cannot_be_is_refused_not_found_guilty() -> None:
    @simulate(runs=3)
    async def test(world: World) -> None:
        world.produce("orders", 1)
        world.produce("bills", 1)

    with pytest.raises(ImpossiblePlan, match="a world has one topic"):
        test()
