"""A token decodes to the plan of its origin; any other text decodes to a plan or raises TokenRefused.

Each plan has one text. Several compressed forms decode to the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from memsource.sim.errors import TokenRefused
from memsource.sim.plans.faults import FaultBudget
from memsource.sim.plans.plan import FAULT_KINDS, NUMBERS_END, Plan
from memsource.sim.plans.strategies import plans
from memsource.sim.plans.token import decode, encode
from tests.memsource.sim.tokens import QUIET, armoured, forged, text_of

BUDGET = FaultBudget(**dict.fromkeys(FAULT_KINDS, 2))
PLANS = st.builds(
    lambda plan, limit: replace(plan, limit=limit),
    plans(BUDGET, boundaries=NUMBERS_END, max_turn=NUMBERS_END - 1),
    st.none() | st.integers(1, NUMBERS_END - 1),
)

NUMBERS = st.sampled_from([0, 1, -1, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, True]) | st.integers() | st.floats()
VALUES = st.recursive(
    st.none() | NUMBERS | st.text(max_size=4) | st.sampled_from([*FAULT_KINDS, "kafka", "jetstream"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)
FAULTS = st.lists(st.tuples(NUMBERS, st.sampled_from(FAULT_KINDS), NUMBERS, NUMBERS) | VALUES, max_size=3)
NAMES = st.sampled_from(["lanes", "python", "personality", "seed", "limit", "faults", "deviations", "jumps", "x"])


def check_made(plan: Plan) -> None:
    """Check a token of a plan."""
    token = encode(plan)
    assert decode(token) == plan
    assert token.isascii() and token.isprintable() and len(token) < 2_000


def check_hostile(token: str) -> None:
    """Read a token that any user may have written."""
    try:
        plan = decode(token)
    except TokenRefused as error:
        assert str(error).startswith("replay token") and len(str(error)) < 1_000  # noqa: PT017 (is the invariant)
        return
    assert text_of(token) == text_of(encode(plan))


@st.composite
def changed(draw: st.DrawFn) -> str:
    """Return a real token with a part replaced, removed or repeated, in the token or in its decoded text."""
    token = encode(draw(PLANS))
    inside = draw(st.booleans())
    text = text_of(token) if inside else token
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.sampled_from([start, start + 1, start + 2, len(text)]) | st.integers(start, len(text)))
        put = st.text(st.sampled_from('0123456789,[]{}"-.eE: AZaz_\u0661'), max_size=3)
        text = text[:start] + draw(put | st.just(text[start:end] * 2)) + text[end:]
    return forged(text) if inside else text


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Return tests of tokens: from plans, changed, with other fields, from any bytes, and from any texts."""

    @effort
    @given(PLANS)
    def made(plan: Plan) -> None:
        tick()
        check_made(plan)

    @effort
    @given(changed())
    def changes(token: str) -> None:
        tick()
        check_hostile(token)

    @effort
    @given(st.dictionaries(NAMES, VALUES | FAULTS | st.lists(NUMBERS, max_size=6), max_size=4), st.sets(NAMES))
    def fields(others: dict[str, object], without: set[str]) -> None:
        tick()
        said = {name: value for name, value in (QUIET | others).items() if name not in without}
        check_hostile(forged(json.dumps(said, separators=(",", ":"))))

    @effort
    @given(st.binary(max_size=60))
    def packed(data: bytes) -> None:
        tick()
        check_hostile(armoured(data))
        check_hostile(forged(data))

    @effort
    @given(st.text(max_size=40) | st.text(max_size=20).map("lanes1-".__add__))
    def hostile(token: str) -> None:
        tick()
        check_hostile(token)

    return [made, changes, fields, packed, hostile]
