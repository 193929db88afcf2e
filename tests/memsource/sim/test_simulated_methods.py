"""``simulate`` on the methods of a test class passes the object and then the world."""

from __future__ import annotations

import inspect

import anyio
import pytest

from lanes import Message
from memsource.sim.errors import ImpossiblePlan, SimulationFailed
from memsource.sim.plans.faults import faults
from memsource.sim.runs.simulate import simulate
from memsource.sim.world.world import World

pytest_plugins = ["pytester"]


class Orders:
    def __init__(self) -> None:
        self.got: list[tuple[object, str]] = []

    @simulate(runs=3)
    async def test_right(self, world: World, name: str = "") -> None:
        assert isinstance(world, World)
        self.got.append((type(self), name))

    @simulate(runs=30, faults=faults(crash=1))
    async def test_wrong(self, world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(0.01)

        world.produce("orders", n=3)
        world.workers(1, handle)
        await world.settled()
        assert not world.crashes

    @classmethod
    @simulate(runs=2)
    async def test_of_the_class(cls, world: World) -> None:
        assert (cls, type(world)) == (Orders, World)

    @staticmethod
    @simulate(runs=2)
    async def test_static(world: World, name: str) -> None:
        assert (type(world), name) == (World, "static")


def test_a_method_gets_its_object_and_a_world() -> None:
    orders = Orders()
    orders.test_right("a fixture")
    orders.test_right(name="by name")
    assert set(orders.got) == {(Orders, "a fixture"), (Orders, "by name")}
    assert str(inspect.signature(Orders.test_right)) == "(self, name: 'str' = '')"
    Orders.test_of_the_class()
    Orders.test_static("static")


def test_campaign_and_replay_take_the_object() -> None:
    with pytest.raises(SimulationFailed):
        Orders().test_wrong()
    failure = Orders.test_wrong.campaign(Orders()).failure
    assert failure is not None
    run = Orders.test_wrong.replay(failure.token, Orders())
    assert (run.digest, list(run.findings)) == (failure.run.digest, ["AssertionError"])
    with pytest.raises(ImpossiblePlan, match=r"Orders\.test_wrong is a method: also pass the object of the method"):
        Orders.test_wrong.campaign()


def test_pytest_passes_the_other_arguments(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_class="""
import memsource, pytest, unittest

@pytest.fixture
def db(): return {}

class TestOrders:
    @pytest.mark.parametrize("n", [1, 2])
    @memsource.simulate(runs=3)
    async def test_method(self, world, n, db):
        assert type(self) is TestOrders
        assert (type(world), n in (1, 2), db) == (memsource.World, True, {})

class TestCase(unittest.TestCase):
    @memsource.simulate(runs=3)
    async def test_case(self, world):
        self.assertIsInstance(world, memsource.World)
"""
    )
    result = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider", "-W", "error")
    result.assert_outcomes(passed=3)
    assert len([line for line in result.outlines if " 3 runs, " in line]) == 3
