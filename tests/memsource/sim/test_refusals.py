"""Bad use of ``simulate`` is refused at once, by name and with the remedy, and has no later effect."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import lanes
import memsource
from lanes import Message
from lanes_jetstream import JetStreamSource
from lanes_kafka import KafkaDeadLetters, KafkaSource
from memsource.sim.errors import ImpossiblePlan, NeverYields, Refused
from memsource.sim.loop import virtual
from memsource.sim.plans.faults import faults
from memsource.sim.runs.simulate import Simulation, simulate
from memsource.sim.world.world import World


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


def test_a_test_that_publishes_after_its_last_settled_is_refused() -> None:
    @simulate(runs=2)
    async def late(world: World) -> None:
        world.workers(1, ignore)
        await world.settled()
        world.produce("orders", n=7)

    with pytest.raises(
        ImpossiblePlan, match=r"published 7 messages after its last world\.settled\(\), so nothing waited"
    ):
        late()


def test_messages_that_a_handler_publishes_need_no_further_settled() -> None:
    @simulate(runs=2)
    async def forwards(world: World) -> None:
        async def handle(message: Message) -> None:
            if message.value == b"first":
                world.publish("second", key="a")

        world.workers(1, handle)
        world.publish("first", key="a")
        await world.settled()

    forwards()


async def ignore(message: Message) -> None: ...


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda world: world.workers(2, ignore, settings=lanes.Settings()),
            "world.workers has no option settings=: write world.workers(count, App(handler=…, settings=…))",
        ),
        (lambda world: world.workers(2, ignore, mak=ignore), "world.workers has no option mak=: did you mean make=?"),
        (
            lambda world: world.produce("orders", 20, 4),
            "world.produce takes 2 argument(s) without a name, and the call has 3: write the names, such as keys=…",
        ),
        (lambda world: world.produce("orders"), "world.produce lacks n=: write world.produce(topic, n)"),
        (
            lambda world: world.check(lambda: 1),
            "world.check takes no argument(s) without a name, and the call has 1: write the names, such as state=…",
        ),
    ],
)
def test_a_wrong_call_of_the_world_names_the_right_arguments(call: Callable[[Any], object], says: str) -> None:
    @simulate(runs=2)
    async def wrong(world: World) -> None:
        call(world)

    # The error is no finding, so no failing run is made small and shown.
    with pytest.raises(ImpossiblePlan, match=f"^{re.escape(says)}$"):
        wrong()


def test_a_wrong_option_of_simulate_is_named() -> None:
    made: Any = simulate
    with pytest.raises(ImpossiblePlan, match=r"^memsource\.simulate has no option run=: did you mean runs=\?$"):
        made(run=4)


def test_a_type_error_of_a_payload_keeps_its_text() -> None:
    @simulate(runs=2)
    async def wrong(world: World) -> None:
        world.produce("orders", 1, value=lambda number, key: key + "x")  # type: ignore[operator]

    with pytest.raises(memsource.SimulationFailed, match="can't concat str to bytes"):
        wrong()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda: time.sleep(1), r"^time\.sleep, called at .*test_refusals\.py.*await anyio\.sleep"),
        (lambda: threading.Thread(target=print).start(), r'^threading\.Thread\.start.*threads="inline"'),
        (lambda: socket.socket(), r"^socket\.socket.*answers from memory"),
        (lambda: subprocess.run(["true"], check=True), r"^subprocess\.Popen.*give the handler a function"),
        (
            lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
            r"^signal\.signal.*call the function of the signal's handler",
        ),
    ],
    ids=["sleep", "thread", "socket", "subprocess", "signal"],
)
def test_calls_without_virtual_time_are_refused(body: Callable[[], object], says: str) -> None:
    with pytest.raises(Refused, match=says):
        simulated(body)()


@pytest.mark.parametrize(
    "source",
    [
        lambda: KafkaSource({"bootstrap.servers": "127.0.0.1:9", "group.id": "g"}, topics=["orders"]),
        lambda: JetStreamSource("nats://127.0.0.1:9", stream="ORDERS", durable="d", key=None),
        lambda: memsource.MemorySource(memsource.MemoryBroker()),
    ],
    ids=["kafka", "jetstream", "memory"],
)
def test_a_consumer_that_the_test_itself_runs_is_refused_with_the_workers_of_the_world(
    source: Callable[[], lanes.Source],
) -> None:
    @simulate(runs=2)
    async def test(world: World) -> None:
        async def handle(message: Message) -> None: ...

        await lanes.run(source(), handle)

    with pytest.raises(Refused, match=r"has no virtual time; start the consumer by world\.workers\(count, handler\)"):
        test()


@pytest.mark.parametrize(
    "start",
    [lambda test_orders: asyncio.run(test_orders()), lambda test_orders: anyio.run(test_orders())],
    ids=["asyncio", "anyio"],
)
def test_a_simulated_test_that_a_loop_shall_run_is_refused_before_the_runs(start: Callable[..., object]) -> None:
    worlds: list[World] = []

    @simulate(runs=2)
    async def test_orders(world: World) -> None:
        worlds.append(world)

    with pytest.raises(ImpossiblePlan, match=r"returns no coroutine: write test_orders\(\) without \w+\.run$"):
        start(test_orders)
    assert worlds == []


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"{}", r"^value=b'\{\}': must be a function of the message's number and key; write value=lambda number, key"),
        (lambda number, key: {"order": number}, r"^value= returned a dict for message 0: must return bytes or a text"),
    ],
    ids=["bytes", "dict"],
)
def test_a_payload_that_is_no_function_of_a_message_is_refused(value: Any, says: str) -> None:
    @simulate(runs=2)
    async def test(world: World) -> None:
        world.produce("orders", 2, value=value)

    with pytest.raises(ImpossiblePlan, match=says):
        test()


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

    monkeypatch.setattr("memsource.sim.runs.run.run", impatient)

    def spins() -> None:
        while True:
            pass

    with pytest.raises(NeverYields, match=r"'w-1' does not yield: turn \d+, at .*test_refusals\.py:\d+ in spins"):
        simulated(spins)()
    # The plan is not shrunk, because each run would take as long.
    assert len(runs) == 1


def test_a_plain_handler_is_refused_and_is_no_finding() -> None:
    @simulate(runs=3)
    async def test(world: World) -> None:
        world.workers(1, lambda message: None)

    with pytest.raises(Refused, match=r"^the handler <lambda> is a plain function, which runs in threads"):
        test()


def test_an_impossible_world_is_refused_and_is_no_finding() -> None:
    @simulate(runs=3)
    async def test(world: World) -> None:
        world.produce("orders", 1)
        world.produce("bills", 1)

    with pytest.raises(ImpossiblePlan, match="publish to one topic only"):
        test()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partitions": "2"}, r"^partitions='2': must be a whole number, 1 or more, not a str$"),
        ({"partitions": 0}, r"^partitions=0: must be a whole number, 1 or more$"),
        ({"partitions": 2.5}, r"^partitions=2\.5: must be a whole number"),
        ({"partitions": True}, r"^partitions=True: must be a whole number"),
        ({"threads": "inlin"}, r"^threads='inlin': use one of refuse, inline$"),
        ({"setup": 3}, r"^setup=3: must be a plain function; put async code into the test"),
        ({"time_limit": 0}, r"^time_limit=0: must be a number of virtual seconds above 0$"),
        ({"time_limit": float("inf")}, r"^time_limit=inf: must be"),
        ({"time_limit": "1 h"}, r"^time_limit='1 h': must be"),
        ({"faults": {"crash": 1}}, r"^faults=\{'crash': 1\}: must be made by memsource\.faults, as in faults=faults\("),
        ({"faults": 3}, r"^faults=3: must be made by memsource\.faults"),
        ({"faults": {}}, r"^faults=\{\}: must be made by memsource\.faults"),
        ({"seed": "x"}, r"^seed='x': must be a whole number in 0 … 2\*\*64-1, not a str$"),
        ({"seed": -1}, r"^seed=-1: must be a whole number in 0"),
        ({"sometimes": "retry"}, r"^sometimes='retry': must be a sequence of names, such as \['retry'\]$"),
        ({"sometimes": 3}, r"^sometimes=3: must be a sequence of names"),
        (
            {"sometimes": ["fault: crsh"]},
            r"'fault: crsh'; use an event of the history .* or 'fault: ' followed by one of c",
        ),
        ({"sometimes": [3]}, r"unknown name 3; use an event"),
        (
            {"sometimes": ["retyr"]},
            r"'retyr'; use an event of the history \(.*, retry, .*\), or 'fault: '",
        ),
        ({"runs": "5"}, r"^runs='5': must be a whole number, 1 or more, not a str$"),
        ({"runs": 0}, r"^runs=0: must be a whole number, 1 or more$"),
        ({"runs": 2.5}, r"^runs=2\.5: must be a whole number, 1 or more$"),
        ({"runs": True}, r"^runs=True: must be a whole number"),
        ({"runs": 1}, r"^runs=1: fewer than the personalities kafka, jetstream; set runs to 2 or more$"),
        (
            {"runs": 2, "faults": faults(crash=1)},
            r"^runs=2: the first run on each of kafka, jetstream has no faults, so",
        ),
        (
            {"runs": 1, "faults": faults(crash=5), "personalities": ("kafka",)},
            r"^runs=1: the first run on each of kafka has no faults, so no run would have faults; set runs to 2",
        ),
        ({"personalities": "kafka"}, r"^personalities='kafka': must be a sequence"),
    ],
)
def test_impossible_options_are_refused_before_any_run(options: dict[str, Any], said: str) -> None:
    async def test(world: World) -> None:
        """Never run."""

    with pytest.raises(ImpossiblePlan, match=said):
        simulate(**{"runs": 3, **options})(test)


def test_two_runs_use_both_brokers_without_faults() -> None:
    ran: list[str] = []

    async def test(world: World) -> None:
        ran.append(f"{world.plan.personality} {len(world.plan.faults)}")

    simulate(runs=2)(test)()
    assert set(ran) == {"kafka 0", "jetstream 0"}
    ran.clear()
    simulate(runs=1, personalities=("jetstream",))(test)()
    assert set(ran) == {"jetstream 0"}


def test_an_asynchronous_setup_is_refused() -> None:
    async def clear() -> None:
        """A setup that must be awaited."""

    async def test(world: World) -> None:
        """Never run."""

    with pytest.raises(
        ImpossiblePlan, match=r"^setup=<function .*clear.*must be a plain function; put async code into the test"
    ):
        simulate(setup=clear)(test)
    with pytest.raises(ImpossiblePlan, match=r"^setup=.*returned <coroutine object .*clear.*must be a plain function"):
        simulate(setup=lambda: clear())(test)()


async def of_nothing() -> None: ...
async def of_an_option(*, world: World) -> None: ...
async def of_self_alone(self: object) -> None: ...
async def of_many(*worlds: World) -> None: ...
async def behind_a_fixture(db: object, world: object) -> None: ...
async def behind_a_fixture_by_type(db: object, w: World) -> None: ...
async def behind_two(self: object, db: object, world: object) -> None: ...


@pytest.mark.parametrize(
    ("test", "said"),
    [
        (of_nothing, r"^simulate\(of_nothing\): its first parameter must be the world, but its parameters are empty$"),
        (of_an_option, r"^simulate\(of_an_option\): .* must be the world, but its parameters are world: 'World'$"),
        (of_self_alone, r"must be the world, but its parameters are self: 'object'$"),
        (of_many, r"must be the world, but its parameters are \*worlds: 'World'$"),
        (
            behind_a_fixture,
            r"^simulate\(behind_a_fixture\): 'db' precedes the world; make the world the first para",
        ),
        (behind_a_fixture_by_type, r"'db' precedes the world"),
        (behind_two, r"'db' precedes the world"),
        (print, r"^simulate\(print\): must be an async function of a world; pass options by name$"),
        (500, r"^simulate\(500\): must be an async function of a world; pass options by name$"),
    ],
)
def test_a_test_without_a_world_as_first_parameter_is_refused(test: Any, said: str) -> None:
    with pytest.raises(ImpossiblePlan, match=said):
        simulate(test)


async def rows() -> dict[str, int]:
    return {}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            {"a": 1},
            r"^check\(state=\{'a': 1\}\): must be a plain function that returns the state, such as lambda: rows",
        ),
        (rows, r"^check\(state=<function rows.*await the state before the call$"),
        (lambda: rows(), r"^check\(state=…\): the function returned <coroutine object rows.*await the result before"),
        (
            threading.Lock,
            r"^check\(state=…\): the returned value cannot be copied and compared \(cannot pickle.*plain v",
        ),
    ],
)
def test_a_state_that_cannot_be_compared_is_refused(state: Any, said: str) -> None:
    @simulate(runs=3)
    async def test(world: World) -> None:
        await world.settled()
        world.check(state=state)

    with pytest.raises(ImpossiblePlan, match=said):
        test()


@pytest.mark.parametrize("produces", ["before", "again"])
def test_a_state_that_is_not_final_is_refused(produces: str) -> None:
    @simulate(runs=3)
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            """Nothing."""

        world.produce("orders", n=2)
        world.workers(1, handle)
        if produces == "again":
            await world.settled()
            world.check(state=lambda: 1)
            world.produce("orders", n=2)
        world.check(state=lambda: 1)

    with pytest.raises(
        ImpossiblePlan, match=r"^check\(state=…\) while faults happen: .* after await world\.settled\(\)"
    ):
        test()


@pytest.mark.parametrize("call", ["none", "without await"])
@pytest.mark.filterwarnings("ignore:coroutine 'World.settled' was never awaited")
def test_a_test_that_never_awaits_settled_is_refused(call: str) -> None:
    @simulate(runs=2)
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            raise KeyError("never noticed")

        world.produce("orders", n=5)
        world.workers(2, handle)
        if call == "without await":
            world.settled().close()

    with pytest.raises(
        ImpossiblePlan, match=r"published 5 messages and ended without world\.settled\(\).*await world\.settled\(\)"
    ):
        test()


def test_a_test_without_messages_need_not_await_settled() -> None:
    @simulate(runs=2)
    async def test(world: World) -> None:
        assert world.now == 0.0

    test()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"dead_letters": KafkaDeadLetters({"bootstrap.servers": "127.0.0.1:9"}, "given_up")},
            "App: dead_letters=a KafkaDeadLetters: must be True or False. A simulation replaces the target",
        ),
        ({"dead_letters": memsource.MemoryDeadLetters(memsource.MemoryBroker())}, "dead_letters=a MemoryDeadLetters"),
        ({"dead_letters": "given_up"}, "App: dead_letters='given_up': must be True or False"),
        ({"dead_letters": None}, "of the dead letters: pass dead_letters=True, and read world.dead_letters"),
        ({"settings": lanes.Retry()}, "App: settings is a Retry: pass a lanes.Settings(…), or None"),
        ({"deadletters": True}, "memsource.App has no option deadletters=: did you mean dead_letters=?"),
    ],
    ids=["kafka", "memory", "text", "none", "settings", "misspelt"],
)
def test_an_app_refuses_a_wrong_argument(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ImpossiblePlan, match=re.escape(said)):
        memsource.App(handler=print, **arguments)
