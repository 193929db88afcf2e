"""The constructors of memory sources and of plans refuse an argument of a wrong kind, and name it."""

from __future__ import annotations

from typing import Any

import pytest

from lanes import ConfigError, Term
from memsource import (
    Fault,
    FaultBudget,
    Group,
    GroupSource,
    ImpossiblePlan,
    MemoryAttempts,
    MemoryBroker,
    MemoryDeadLetters,
    MemorySource,
    Plan,
    Schedule,
    Traffic,
    simulate,
)

BROKER, GROUP = MemoryBroker(3), Group()

WRONG: list[Any] = [5, "no flag", {"a": 1}, [1], True, None, dict, object(), 0.5]

ARGUMENTS: list[tuple[Any, dict[str, Any], str, tuple[Any, ...]]] = [
    (MemoryBroker, {}, "partitions", (5,)),
    (MemoryBroker, {}, "name", ("no flag",)),
    (MemoryBroker, {}, "ack_wait", (5, 0.5)),
    (MemoryBroker, {}, "max_unacked", (5, None)),
    (MemorySource, {}, "broker", ()),
    (MemorySource, {"broker": BROKER}, "name", ("no flag", None)),
    (MemorySource, {"broker": BROKER}, "assigned", ([1], None)),
    (MemorySource, {"broker": BROKER}, "batch", (5,)),
    (MemorySource, {"broker": BROKER}, "extend_interval", (5, 0.5, None)),
    (MemorySource, {"broker": BROKER}, "plans", (True,)),
    (MemorySource, {"broker": BROKER}, "clock", (dict,)),
    (MemoryDeadLetters, {}, "broker", ()),
    (MemoryAttempts, {}, "call", (dict, None)),
    (MemoryAttempts, {}, "seconds", (5, 0.5)),
    (Group, {}, "partitions", (5,)),
    (Group, {}, "name", ("no flag",)),
    (Group, {}, "cooperative", (True,)),
    (Group, {}, "assignor", (dict, None)),
    (GroupSource, {"member": "m"}, "group", ()),
    (GroupSource, {"group": GROUP}, "member", ("no flag",)),
    (GroupSource, {"group": GROUP, "member": "m"}, "batch", (5,)),
    (GroupSource, {"group": GROUP, "member": "m"}, "revoke_timeout", (5, 0.5)),
    (GroupSource, {"group": GROUP, "member": "m"}, "hands_over", (True,)),
    (Traffic, {}, "n", (5,)),
    (Traffic, {}, "keys", (5, [1])),
    (Traffic, {}, "skew", (5, 0.5)),
    (Traffic, {}, "hot", (0.5,)),
    (Traffic, {}, "keyless", (0.5,)),
    (Traffic, {}, "gaps", (0.5,)),
    (FaultBudget, {}, "crash", (5,)),
    (Fault, {"kind": "crash"}, "at", (5,)),
    (Fault, {"at": 5}, "kind", ()),
    (Fault, {"at": 5, "kind": "crash"}, "amount", (5, 0.5)),
    (Schedule, {}, "deviations", ()),
    (Schedule, {}, "jumps", ([1],)),
    (Plan, {}, "personality", ()),
    (Plan, {}, "seed", (5,)),
    (Plan, {}, "faults", ()),
    (Plan, {}, "schedule", ()),
    (Plan, {}, "limit", (5, None)),
]

OPTIONS: list[tuple[str, tuple[Any, ...]]] = [
    ("runs", (5,)),
    ("faults", (None,)),
    ("personalities", ()),
    ("partitions", (5,)),
    ("threads", ()),
    ("setup", (dict, None)),
    ("seed", (5,)),
    ("sometimes", ()),
    ("time_limit", (5, 0.5)),
]


def is_valid(value: object, valid: tuple[Any, ...]) -> bool:
    return any(value is each or (type(value) is type(each) and value == each) for each in valid)


@pytest.mark.parametrize(
    ("kind", "others", "name", "valid"),
    [pytest.param(*each, id=f"{each[0].__name__}-{each[2]}") for each in ARGUMENTS],
)
def test_every_class_of_memsource_refuses_arguments_of_a_wrong_type(
    kind: Any, others: dict[str, Any], name: str, valid: tuple[Any, ...]
) -> None:
    for value in WRONG:
        if is_valid(value, valid):
            kind(**{**others, name: value})
            continue
        with pytest.raises((ConfigError, ImpossiblePlan)):
            kind(**{**others, name: value})


@pytest.mark.parametrize(("name", "valid"), OPTIONS)
def test_simulate_refuses_an_option_of_a_wrong_type(name: str, valid: tuple[Any, ...]) -> None:
    async def job(world: Any) -> None:
        """Do nothing."""

    make: Any = simulate
    for value in WRONG:
        if is_valid(value, valid):
            make(**{name: value})(job)
            continue
        with pytest.raises(ImpossiblePlan):
            make(**{name: value})(job)


@pytest.mark.parametrize("reason", [None, 5, ValueError("card 4711"), b"no such card"])
def test_a_reason_of_a_loss_that_is_no_text_is_refused(reason: Any) -> None:
    with pytest.raises(TypeError, match="the reason must be a str"):
        Term(reason)


@pytest.mark.parametrize("value", [None, 5, {"a": 1}, bytearray(b"a")])
def test_a_value_that_no_broker_takes_is_refused(value: Any) -> None:
    for broker in (MemoryBroker(), Group(1)):
        with pytest.raises(TypeError, match=r"value is (None|an? \w+): a broker takes bytes; pass bytes, a str"):
            broker.publish(value, key="a")
