"""A token decodes to its plan, is short, and is refused with the reason when it is damaged."""

from __future__ import annotations

import base64
import random
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsource.sim.errors import ImpossiblePlan, TokenRefused
from memsource.sim.plans import token as module
from memsource.sim.plans.faults import FaultBudget, draw
from memsource.sim.plans.plan import AMOUNT_MAX, FAULT_KINDS, NUMBERS_END, Fault, Plan, Schedule
from memsource.sim.plans.strategies import plans
from memsource.sim.plans.token import DICTIONARY, LIMIT, decode, encode
from tests.memsource.sim.tokens import LANES, PYTHON, armoured, deflated, forged, of_fields, text_of

BUDGET = FaultBudget(**dict.fromkeys(FAULT_KINDS, 2))
LIMITS = st.none() | st.integers(1, 500)


def limited(plan: Plan, limit: int | None) -> Plan:
    return Plan(plan.personality, plan.seed, plan.faults, plan.schedule, limit)


PLANS = st.builds(limited, plans(BUDGET, max_turn=100_000), LIMITS)


@pytest.mark.long
@given(PLANS)
def test_an_encoded_plan_decodes_to_itself(plan: Plan) -> None:
    token = encode(plan)
    assert decode(token) == plan
    assert encode(decode(token)) == token
    assert token.isascii() and token.isprintable() and " " not in token


def test_a_token_has_the_documented_format() -> None:
    plan = Plan(
        "jetstream",
        7,
        (Fault(3, "crash", 1, 0.5), Fault(9, "redeliver")),
        Schedule(deviations=((4, 1), (10, 3)), jumps=(2, 7)),
        12,
    )
    assert text_of(encode(plan)) == (
        f'{{"lanes":"{LANES}","python":"{PYTHON}","personality":"jetstream","seed":7,"limit":12,'
        '"faults":[[3,"crash",1,0.5],[9,"redeliver",0,0.0]],"deviations":[4,1,6,3],"jumps":[2,5]}'
    )
    assert decode(forged(text_of(encode(plan)))) == plan
    assert decode(of_fields()) == Plan()


def test_a_typical_token_is_short() -> None:
    rng = random.Random(1)
    budget = FaultBudget(crash=1, rebalance=2, redeliver=2)
    lengths = []
    for _ in range(200):
        turns = sorted(rng.sample(range(10_000), 5))
        schedule = Schedule(tuple((turn, rng.randint(1, 6)) for turn in turns))
        plan = Plan("jetstream", rng.getrandbits(32), draw(budget, "jetstream", 500, rng), schedule, 20)
        lengths.append(len(encode(plan)))
    assert max(lengths) < 200
    assert len(encode(Plan(seed=NUMBERS_END - 1))) < 80


def test_the_largest_numbers_are_decoded_unchanged() -> None:
    end = NUMBERS_END - 1
    plan = Plan(
        seed=end,
        faults=(Fault(0, "clock_jump", end, -AMOUNT_MAX), Fault(end, "freeze", end, 0.1)),
        schedule=Schedule(((end, end),), (end,)),
        limit=end,
    )
    assert decode(encode(plan)) == plan


@pytest.mark.long
def test_a_walk_of_many_steps_has_a_token_and_an_endless_one_has_none() -> None:
    rng = random.Random(1)
    walk = Schedule(tuple((turn, rng.randint(1, 9)) for turn in range(50_000)))
    assert decode(encode(Plan(schedule=walk))).schedule == walk
    endless = Schedule(jumps=tuple(range(LIMIT)))
    with pytest.raises(ImpossiblePlan, match="a plan of 0 faults and 1048576 deviations is too large for a token"):
        encode(Plan(schedule=endless))


def test_a_token_of_another_zlib_is_decoded() -> None:
    text = text_of(encode(Plan(seed=12, limit=3))).encode()
    stored = armoured(deflated(text, level=0))
    assert stored != encode(Plan(seed=12, limit=3))
    assert decode(stored) == Plan(seed=12, limit=3)


@pytest.mark.long
@given(PLANS, st.data())
def test_one_wrong_character_is_detected(plan: Plan, data: st.DataObject) -> None:
    token = encode(plan)
    at = data.draw(st.integers(0, len(token) - 1))
    letters = "".join(letter for letter in "AZaz09-_ \n=+" if letter != token[at])
    with pytest.raises(TokenRefused):
        decode(token[:at] + data.draw(st.sampled_from(letters)) + token[at + 1 :])


@pytest.mark.long
@given(PLANS, st.data())
def test_a_cut_or_a_longer_token_is_refused(plan: Plan, data: st.DataObject) -> None:
    token = encode(plan)
    with pytest.raises(TokenRefused):
        decode(token[: data.draw(st.integers(0, len(token) - 1))])
    with pytest.raises(TokenRefused):
        decode(token + data.draw(st.text("Aa0-_ \n=", min_size=1, max_size=5)))


@pytest.mark.parametrize("left", [2, 3])
def test_a_token_with_a_spare_bit_set_is_refused(left: int) -> None:
    # A last group of two or three characters has four or two spare bits.
    tokens = (encode(Plan(seed=seed)) for seed in range(1_000))
    token = next(token for token in tokens if len(token.removeprefix("lanes1-")) % 4 == left)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for spare in (1, 2, 3):
        twin = token[:-1] + letters[letters.index(token[-1]) + spare]
        body = [each.removeprefix("lanes1-") + "=" * (4 - left) for each in (token, twin)]
        assert base64.urlsafe_b64decode(body[0]) == base64.urlsafe_b64decode(body[1])
        with pytest.raises(TokenRefused, match="is damaged"):
            decode(twin)


def said_of(token: Any) -> str:
    with pytest.raises(TokenRefused) as caught:
        decode(token)
    assert str(caught.value).startswith("replay token")
    assert len(str(caught.value)) < 700
    return str(caught.value)


QUIET = encode(Plan())
BEYOND = "9" * 30


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (b"lanes1-AAAA", "is a bytes, not a str; paste the token of the failing run"),
        ("", "does not begin with 'lanes1-'; paste the token of the failing run"),
        ("lanes2-AAAA", "token 'lanes2-AAAA': does not begin with 'lanes1-'"),
        ("lanes1-", "is damaged (its checksum is wrong); paste the whole token"),
        ("lanes1-A", "is damaged"),
        ("lanes1-AAAAAA", "is damaged"),
        (QUIET + "\n", f"has '\\n' at character {len(QUIET)}; paste the token as one word, without quotes"),
        (f"{QUIET[:9]} {QUIET[9:]}", "has ' ' at character 9"),
        (QUIET[:-2], "is damaged"),
        ("lanes1-" + "A" * LIMIT, "characters, and 1048576 is the limit; paste only the token"),
        (armoured(deflated(b"{}"), check=7), "its checksum is wrong"),
        (armoured(b"\x07\x07\x07"), "its content cannot be read"),
        (armoured(deflated(b"{}")[:-1]), "its content is cut off or too long"),
        (armoured(deflated(b"{}") + b"\x00"), "its content is cut off or too long"),
        (forged(b"\xff\xfe"), "its content cannot be read"),
        (forged(b" " * (LIMIT + 1)), "its content has more than 1048576 characters"),
        (forged(b"{"), "its content is not JSON"),
        (forged(b"[" * 100_000), "its content is not JSON"),
        (forged(b'{"seed":' + b"9" * 5_000 + b"}"), "its content is not JSON"),
        (forged(b'{"seed":NaN}'), "its content is not JSON (NaN is not a number)"),
        (forged(b"[1]"), "its content is a list, not an object"),
        (of_fields(lanes="9.9.9"), f"was made by lanes '9.9.9', and this process has lanes {LANES}; replay"),
        (of_fields(python="3.2"), f"was made by python '3.2', and this process has python {PYTHON}"),
        (of_fields(lanes="9.9.9", surprise=1), "was made by lanes '9.9.9'"),
        (of_fields(python=None), "was made by python None"),
        (of_fields(surprise=1), "has the unknown field 'surprise'; use lanes, python, personality, seed, limit"),
        (of_fields(personality=None), "personality None is unknown"),
        (of_fields(personality="rabbit"), "personality 'rabbit' is unknown: use one of kafka, jetstream"),
        (of_fields(personality=["kafka"]), "personality ['kafka'] is unknown"),
        (of_fields(personality={}), "personality {} is unknown"),
        (of_fields(seed="1"), "seed=1: must be a whole number"),
        (of_fields(seed=-1), "seed=-1"),
        (of_fields(seed=1.0), "seed=1.0"),
        (of_fields(seed=True), "seed=True"),
        (of_fields(limit=0), "limit=0: must be a number of messages, 1 or more"),
        (of_fields(faults={}), "its faults are a dict, not a list"),
        (of_fields(faults=[3]), "has no valid plan"),
        (of_fields(faults=[[1, "crash", 0, 0.0, 5]]), "has no valid plan"),
        (of_fields(faults=[[1, "explode", 0, 0.0]]), "fault kind 'explode' is unknown"),
        (of_fields(faults=[[1, {}, 0, 0.0]]), "fault kind {} is unknown"),
        (of_fields(faults=[[1, "x" * 5_000, 0, 0.0]]), "fault kind 'xxx"),
        (of_fields(faults=[[int(BEYOND), "crash", 0, 0.0]]), "at and target must be whole numbers"),
        (of_fields(faults=[[1, "redeliver", 0, 0.0]]), "never happens on 'kafka'"),
        (of_fields(faults=[[2, "crash", 0, 0.0], [1, "crash", 0, 0.0]]), "not in the order of their boundaries"),
        (of_fields(faults=[]), "its text was changed; paste a token that lanes printed"),
        (of_fields(faults=[[1, "crash", 0]]), "its text was changed"),
        (of_fields(faults=[[1, "crash", 0, 1]]), "its text was changed"),
        (of_fields(deviations=[3]), "its deviations have a turn without an index"),
        (of_fields(deviations=[3, 0]), "deviation (3, 0)"),
        (of_fields(deviations=[3, 1, 0, 1]), "turn 3 follows turn 3"),
        (of_fields(deviations=[3, "1"]), "deviation (3, 1)"),
        (
            of_fields(deviations=[[3, 1], [4, 1]]),
            "has the distance [3, 1] between turns; must be a whole number below 2**64",
        ),
        (of_fields(deviations="31"), "its deviations are a str, not a list"),
        (of_fields(jumps=[-1]), "has the distance -1 between turns"),
        (of_fields(jumps=[1.5]), "has the distance 1.5 between turns"),
        (of_fields(jumps=[int("9" * 4_300), int("9" * 4_300)]), "has the distance 999"),
        (of_fields(jumps=[]), "its text was changed"),
        (of_fields(jumps=0), "its jumps are a int, not a list"),
        (forged(text_of(QUIET) + " "), "its text was changed"),
        (forged(text_of(QUIET).replace('"seed":0', '"seed":1,"seed":0')), "its text was changed"),
        (forged(text_of(QUIET).replace('"seed":0', '"seed":0,"limit":null')), "its text was changed"),
    ],
)
def test_an_invalid_token_is_refused_by_name(token: object, said: str) -> None:
    assert said in said_of(token)


def test_a_token_of_another_python_or_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(module, "_PYTHON", "3.99")
        of_tomorrow = encode(Plan())
        assert decode(of_tomorrow) == Plan()
    assert "was made by python '3.99'" in said_of(of_tomorrow)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(module, "_LANES", "0.0.1")
        of_yesterday = encode(Plan())
    assert "was made by lanes '0.0.1'" in said_of(of_yesterday)


def test_a_compression_bomb_takes_no_memory() -> None:
    bomb = forged(b"0" * 64_000_000)
    assert len(bomb) < LIMIT
    tracemalloc.start()
    try:
        assert "its content has more than" in said_of(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 * LIMIT
    finally:
        tracemalloc.stop()


def test_the_dictionary_is_pinned() -> None:
    # The dictionary is a part of the format: another dictionary needs another prefix.
    assert zlib.crc32(DICTIONARY) == 3488659577
