"""A handler for processes runs on the event loop of the simulation, with its bounds and its setup."""

from __future__ import annotations

from lanes import Message, Settings
from memsource.sim.runs.simulate import simulate
from memsource.sim.world.worker import App
from memsource.sim.world.world import World

ready: list[int] = []
"""A mark for each setup."""

seen: list[int] = []


def set_up() -> None:
    ready.append(1)


def handle(message: Message) -> None:
    assert ready, "the setup runs before the handler"
    seen.append(message.position)


def test_a_handler_for_processes_is_simulated_inline() -> None:
    @simulate(runs=2)
    async def test(world: World) -> None:
        settings = Settings(
            sync_handlers="processes",
            processes=2,
            process_setup=set_up,
            timeout=1.0,
            concurrency_per_partition=3,
        )
        world.produce("orders", n=5)
        workers = world.workers(1, App(handler=handle, settings=settings))
        await world.settled()
        assert workers[0].consumer.status().concurrency == 2

    ready.clear()
    seen.clear()
    test()
    assert len(ready) >= 2
    assert len(seen) == 5 * len(ready)
