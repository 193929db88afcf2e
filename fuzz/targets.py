"""All targets by name."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from fuzz import dead_letter, engine, history, ledger, modes, offset_ledger, offset_map, plan, record, reply, token
from fuzz.running import Target


def _target(module: ModuleType, batch: int) -> Target:
    assert module.__doc__ is not None
    return Target(
        name=module.__name__.rpartition(".")[2],
        invariant=module.__doc__.splitlines()[0],
        properties=module.properties,
        batch=batch,
    )


TARGETS: Final = {
    target.name: target
    for target in (
        _target(engine, 15),
        _target(modes, 15),
        _target(ledger, 300),
        _target(offset_ledger, 100),
        _target(history, 300),
        _target(reply, 600),
        _target(offset_map, 300),
        _target(dead_letter, 300),
        _target(record, 100),
        _target(token, 100),
        _target(plan, 50),
    )
}
