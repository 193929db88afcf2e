"""The token of a plan: one word that a failing run prints, and that repeats the run.

**The format.** A token is ``lanes1-`` and the base64url without padding of these bytes:

| bytes | field | encoding |
|---|---|---|
| 4 | check | CRC-32 of the bytes of the plan, little-endian |
| … | plan | JSON without blanks, deflated (no header, the dictionary below) |

The JSON names the version of lanes, the minor version of Python, personality, seed, and the other fields of the plan
that differ from their defaults. The JSON stores each turn as the distance from the previous turn. A plan has exactly
one JSON text. The compressed bytes depend on the version of zlib.

A token repeats its run only with the same version of lanes and minor version of Python, because other versions schedule
other steps. ``decode`` refuses a token of another version.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
import zlib
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import accumulate, pairwise
from typing import Any, Final, NoReturn, cast

from memsource.sim.errors import ImpossiblePlan, TokenRefused
from memsource.sim.plans.plan import NUMBERS_END, Fault, Plan, Schedule

LIMIT: Final = 1 << 20
"""The most characters of a token, and of its JSON text: enough for some 200,000 deviations."""

DICTIONARY: Final = (
    b'"jumps":["deviations":[,1,2,1,1],"limit":,"rebalance","redeliver","lost","slow","commit_fails","letter_fails",'
    b'"io_fails","clock_jump","freeze",0,0.0],["crash",0,1.0]],"faults":[[{"lanes":"0.1.0","python":"3.11",'
    b'"personality":"jetstream","kafka","seed":'
)
"""Preset dictionary of the compression: parts of most texts, the most frequent last. A change breaks the format."""

_LANES: Final = version("lanes-runtime")
_PYTHON: Final = "{}.{}".format(*sys.version_info)
_PREFIX: Final = "lanes1-"
_CHECK_BYTES: Final = 4
_SHOWN: Final = 200

_FIELDS: Final = ("lanes", "python", "personality", "seed", "limit", "faults", "deviations", "jumps")


def encode(plan: Plan) -> str:
    """Return the token of a plan: printable, without a blank, usually below 200 characters.

    Args:
        plan: The plan.

    Returns:
        The token.

    Raises:
        ImpossiblePlan: The plan is too large, with more than about 200,000 deviations.
    """
    text = _text(plan)
    if len(text) > LIMIT:
        raise ImpossiblePlan(
            f"a plan of {len(plan.faults)} faults and {len(plan.schedule)} deviations is too large for a token "
            f"({len(text)} characters, and {LIMIT} is the limit): shrink the plan first"
        )
    return _packed(text)


def decode(token: str) -> Plan:
    """Return the plan of a token. The function reads at most 1 MiB of text.

    Args:
        token: A result of ``encode``.

    Returns:
        The plan.

    Raises:
        TokenRefused: The text is no token, is damaged or too large, contains no plan, or is from another version of
            lanes or Python.
    """
    try:
        return _plan(_text_of(token))
    except ImpossiblePlan as error:
        raise TokenRefused(f"replay token: {str(error)[:_SHOWN]}") from error


def _text(plan: Plan) -> str:
    fields: dict[str, object] = {
        "lanes": _LANES,
        "python": _PYTHON,
        "personality": plan.personality,
        "seed": plan.seed,
    }
    if plan.limit is not None:
        fields["limit"] = plan.limit
    if plan.faults:
        fields["faults"] = [[each.at, each.kind, each.target, float(each.amount)] for each in plan.faults]
    if plan.schedule.deviations:
        turns = _distances(turn for turn, _ in plan.schedule.deviations)
        indexes = [index for _, index in plan.schedule.deviations]
        fields["deviations"] = [number for pair in zip(turns, indexes, strict=True) for number in pair]
    if plan.schedule.jumps:
        fields["jumps"] = _distances(plan.schedule.jumps)
    return json.dumps(fields, separators=(",", ":"))


def _packed(text: str) -> str:
    deflater = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, zdict=DICTIONARY)
    data = deflater.compress(text.encode()) + deflater.flush()
    return _PREFIX + _base64(zlib.crc32(data).to_bytes(_CHECK_BYTES, "little") + data)


def _text_of(token: str) -> str:
    """Return the JSON text of a token."""
    if not isinstance(token, str):
        raise TokenRefused(f"replay token: is a {type(token).__name__}, not a str; paste the token of the failing run")
    if not token.startswith(_PREFIX):
        raise TokenRefused(
            f"replay token {_shown(token)}: does not begin with {_PREFIX!r}; paste the token of the failing run"
        )
    if len(token) > LIMIT:
        raise TokenRefused(f"replay token: has {len(token)} characters, and {LIMIT} is the limit; paste only the token")
    foreign = re.search("[^A-Za-z0-9_-]", token)
    if foreign is not None:
        raise TokenRefused(
            f"replay token: has {foreign[0]!r} at character {foreign.start()}; paste the token as one word, without "
            "quotes"
        )
    body = token[len(_PREFIX) :]
    try:
        packed = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except binascii.Error:
        packed = b""
    check, data = packed[:_CHECK_BYTES], packed[_CHECK_BYTES:]
    # The unused bits of the last character must be 0, so that equal bytes have only one token.
    if not data or _base64(packed) != body or zlib.crc32(data).to_bytes(_CHECK_BYTES, "little") != check:
        raise TokenRefused(f"replay token {_shown(token)}: is damaged (its checksum is wrong); paste the whole token")
    return _inflated(data)


def _inflated(data: bytes) -> str:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS, zdict=DICTIONARY)
    try:
        text = inflater.decompress(data, LIMIT + 1)
        if len(text) > LIMIT:
            raise TokenRefused(
                f"replay token: its content has more than {LIMIT} characters; paste the token of a failing run"
            )
        if not inflater.eof or inflater.unused_data:
            raise TokenRefused("replay token: its content is cut off or too long; paste the token of a failing run")
        return text.decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise TokenRefused(
            f"replay token: its content cannot be read ({error}); paste the token of a failing run"
        ) from error


def _plan(text: str) -> Plan:
    fields = _fields(text)
    _check_origin(fields)
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        raise TokenRefused(f"replay token: has the unknown field {_shown(unknown[0])}; use {', '.join(_FIELDS)}")
    deviations = _list(fields, "deviations")
    if len(deviations) % 2:
        raise TokenRefused(
            "replay token: its deviations have a turn without an index; paste the token of a failing run"
        )
    try:
        plan = Plan(
            personality=cast(Any, fields.get("personality")),
            seed=cast(Any, fields.get("seed")),
            faults=tuple(Fault(*each) for each in _list(fields, "faults")),
            schedule=Schedule(
                deviations=tuple(zip(_turns(deviations[::2]), deviations[1::2], strict=True)),
                jumps=tuple(_turns(_list(fields, "jumps"))),
            ),
            limit=cast(Any, fields.get("limit")),
        )
    except TypeError as error:
        raise TokenRefused(f"replay token: has no valid plan ({error}); paste the token of a failing run") from error
    if _text(plan) != text:
        raise TokenRefused("replay token: its text was changed; paste a token that lanes printed")
    return plan


def _fields(text: str) -> dict[str, object]:
    try:
        fields = json.loads(text, parse_constant=_no_number)
    # A number of more than 4,300 digits raises ValueError, and too deep nesting raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise TokenRefused(
            f"replay token: its content is not JSON ({error}); paste the token of a failing run"
        ) from error
    if not isinstance(fields, dict):
        raise TokenRefused(
            f"replay token: its content is a {type(fields).__name__}, not an object; paste the token of a failing run"
        )
    return fields


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _check_origin(fields: dict[str, object]) -> None:
    for name, here in (("lanes", _LANES), ("python", _PYTHON)):
        if fields.get(name) != here:
            raise TokenRefused(
                f"replay token: was made by {name} {_shown(fields.get(name))}, and this process has {name} {here}; "
                f"replay the token with that version of {name}"
            )


def _list(fields: dict[str, object], name: str) -> list[Any]:
    found = fields.get(name, [])
    if not isinstance(found, list):
        raise TokenRefused(
            f"replay token: its {name} are a {type(found).__name__}, not a list; paste the token of a failing run"
        )
    return found


def _distances(turns: Iterable[int]) -> list[int]:
    return [turn - before for before, turn in pairwise((0, *turns))]


def _turns(distances: Sequence[Any]) -> list[int]:
    for distance in distances:
        if type(distance) is not int or not 0 <= distance < NUMBERS_END:
            raise TokenRefused(
                f"replay token: has the distance {_shown(distance)} between turns; must be a whole number below 2**64"
            )
    return list(accumulate(distances))


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _shown(value: object) -> str:
    """Return the repr of an untrusted value, shortened for an error text."""
    return repr(value)[:_SHOWN]
