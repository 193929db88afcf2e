"""A kill at any statement, also after COMMIT and before its answer, neither doubles nor loses an effect."""

from __future__ import annotations

import json

import pytest

from tests.conftest import Spawn
from tests.postgres.killed import MESSAGES
from tests.postgres.tables import Effects


@pytest.mark.parametrize("kind", ["one", "batch"])
def test_a_kill_at_any_statement_neither_doubles_nor_loses_an_effect(kind: str, effects: Effects, spawn: Spawn) -> None:
    process = spawn("-m", "tests.postgres.killed", effects.url, effects.schema, kind)
    out, err = process.communicate()
    assert process.returncode == 0, err
    said = json.loads(out)
    # BEGIN, claim, effect and COMMIT, for each message or once for all.
    assert said["points"] >= (4 * MESSAGES if kind == "one" else 3 + MESSAGES)
    wrong = {name: found for name in said["names"] if (found := effects.all(name)) != list(range(1, MESSAGES + 1))}
    assert wrong == {}
