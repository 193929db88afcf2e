"""The records of a cohort's bucket: their keys, and their values as JSON.

Anybody who may write to the bucket can write anything: whatever ``lanes`` would not have written is a ``ValueError``
that names the key and the remedy. Keys: ``config`` (immutable), ``plan``, ``m.<member>`` (heartbeat, expires),
``l.<partition>`` (lease, expires), ``s.<partition>`` (state, never expires), ``drain.<member>`` (an operator's wish).
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, TypeVar

from lanes.core.cohort.ledger import Done, decode_done, encode_done

__all__ = [
    "CONFIG_KEY",
    "DRAIN_PREFIX",
    "HIGHEST",
    "LEASE_PREFIX",
    "MEMBER_PREFIX",
    "PLAN_KEY",
    "STATE_PREFIX",
    "CohortConfig",
    "DrainRequest",
    "Heartbeat",
    "Lease",
    "PlanRecord",
    "State",
    "check_name",
    "decode",
    "difference",
    "drain_key",
    "encode",
    "lease_key",
    "member_key",
    "state_key",
]

VERSION: Final = 1

CONFIG_KEY: Final = "config"
PLAN_KEY: Final = "plan"
MEMBER_PREFIX: Final = "m."
LEASE_PREFIX: Final = "l."
STATE_PREFIX: Final = "s."
DRAIN_PREFIX: Final = "drain."

HIGHEST: Final = 2**53
"""Whole numbers above it are not the same in every JSON reader. A clock in milliseconds gets there in 285,000 years."""

_NAME: Final = re.compile(r"[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=-]+)*")
_NAME_LIMIT: Final = 128
_SHOWN: Final = 60
_BEFORE: Final = 20
"""Characters in front of the first difference of two long texts that are shown."""


@dataclass(frozen=True, slots=True)
class CohortConfig:
    """What a cohort never changes: written once, compared at every join, but for ``start``, which was for the first.

    ``choice``: how the cohort partitions are made, ``transform`` (the stream has one), ``created`` (with the stream) or
    ``sourced`` (another stream); ``detail``: of which, e.g. the transform's destination. ``tokens``: the key's, from 1.
    ``incarnation``: which making of the stream. ``start``: where the first epoch begins. ``stream``, ``namespace``:
    whose the record is; ``lease``: seconds of every member's leases. What is None was not said, by an earlier version.
    """

    cohort: str
    partitions: int
    choice: str
    detail: str
    tokens: tuple[int, ...]
    incarnation: str
    retention: str
    start: str
    stream: str | None = None
    namespace: str | None = None
    lease: int | None = None


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The plan in force. ``generation`` rises when owners or standbys change, and only then."""

    generation: int
    owners: tuple[str | None, ...]
    members: tuple[str, ...]
    standbys: tuple[str, ...]
    target: int | None
    under_provisioned: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member that lives. ``nonce``: of its process, so that a member id used twice is found. ``session``: when it
    joined, in milliseconds since 1970 by its own clock, for status only. ``lease``: seconds until it expires."""

    nonce: str
    weight: int
    target: int | None
    session: int
    lease: int | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds a partition. ``nonce``: of the acquisition; ``epoch``: once it is chosen. ``released``: nobody does."""

    member: str
    nonce: str
    epoch: int | None = None
    released: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """What survives every lease: the last epoch of a partition and what is done."""

    epoch: int
    done: Done


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """The wish that a member gets no partition while another lives. ``since``: milliseconds since 1970."""

    since: int


Record = CohortConfig | PlanRecord | Heartbeat | Lease | State | DrainRequest
_R = TypeVar("_R", bound=Record)


def lease_key(partition: int) -> str:
    """The key of a partition's lease."""
    return f"{LEASE_PREFIX}{partition}"


def state_key(partition: int) -> str:
    """The key of a partition's state."""
    return f"{STATE_PREFIX}{partition}"


def member_key(member: str) -> str:
    """The key of a member's heartbeat. ``ValueError`` for a name that cannot be one."""
    return MEMBER_PREFIX + check_name("member", member)


def drain_key(member: str) -> str:
    """The key of the wish to drain a member. ``ValueError`` for a name that cannot be one."""
    return DRAIN_PREFIX + check_name("member", member)


def check_name(what: str, name: str) -> str:
    """The name itself, if it may be part of a key; otherwise ``ValueError``."""
    if len(name) > _NAME_LIMIT or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"the {what} name {_short(name)} cannot be part of a key: use letters, digits, '_', '-' and '=', with "
            f"single dots between them, at most {_NAME_LIMIT} in all"
        )
    return name


def encode(record: Record) -> bytes:
    """The value of a record."""
    content: dict[str, Any] = {"version": VERSION}
    if isinstance(record, State):
        content |= {"epoch": record.epoch, "done": encode_done(record.done)}
    else:
        content |= asdict(record)
    return json.dumps(content, separators=(",", ":")).encode()


def decode(kind: type[_R], key: str, value: bytes) -> _R:
    """The record that a key holds. ``ValueError`` with the key and the remedy for what ``encode`` does not make.

    Fields that this version does not know are passed over; another ``version`` is refused.
    """
    try:
        content = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _not_ours(key, value, f"it is not JSON ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise _not_ours(key, value, "it is not an object")
    version = content.get("version")
    if version != VERSION:
        raise _not_ours(key, value, f"its version is {_short(version)}, and this program knows {VERSION}")
    found: dict[str, Any] = {}
    for field in fields(kind):
        try:
            found[field.name] = _CHECKS[str(field.type)](content.get(field.name))
        except ValueError as error:
            raise _not_ours(key, value, f"{field.name}: {error}") from None
    return kind(**found)


def difference(found: CohortConfig, wanted: CohortConfig) -> str | None:
    """What a member that joins wants otherwise than the cohort was set up, with the remedy; None = nothing."""
    differing = {
        field.name: "{} is {}, this member has {}".format(field.name, *_apart(there, here))
        for field in fields(CohortConfig)
        if field.name != "start"
        and (there := getattr(found, field.name)) != (here := getattr(wanted, field.name))
        and not (field.default is None and None in (there, here))
    }
    if not differing:
        return None
    said = "; ".join(differing.values())
    if differing.keys() & {"stream", "namespace"}:
        return f"the bucket is another cohort's, {found.cohort!r}: {said}. Give this one another namespace"
    where = f" (stream {wanted.stream!r}, namespace {wanted.namespace!r})" if wanted.stream is not None else ""
    said = f"the cohort {found.cohort!r} was set up otherwise{where}: {said}. "
    if "incarnation" in differing:
        return (
            f"{said}The stream was deleted and made anew since, and its sequences mean other messages: where that was "
            "meant, stop all members, delete the cohort's bucket, and start them again; or give this member another "
            "namespace"
        )
    said += "Give this member the same settings, or another namespace for a cohort of its own"
    if differing.keys() & {"partitions", "choice", "detail", "tokens"}:
        said += (
            ". Where it is the stream that is divided otherwise by now, divide it as it was: what is stored keeps its "
            "partition, and a key in two of them has two owners"
        )
    if "lease" in differing:
        said += (
            f". To change the lease of all members, stop them, delete the key {CONFIG_KEY!r} of the cohort's bucket, "
            "and start them with the new one"
        )
    return said


def _not_ours(key: str, value: bytes, why: str) -> ValueError:
    return ValueError(
        f"the key {key!r} of the cohort's bucket holds {_short(value)}: {why}. Run the same version of lanes on every "
        "member, and let nothing else write to the bucket; a record that was damaged has to be put back by hand"
    )


def _apart(one: object, other: object) -> tuple[str, str]:
    """Both of two that differ, so that it shows where."""
    begin = 0
    if isinstance(one, str) and isinstance(other, str) and max(len(one), len(other)) > _SHOWN:
        pairs = enumerate(zip(one, other, strict=False))
        same = next((index for index, (here, there) in pairs if here != there), min(len(one), len(other)))
        begin = max(0, same - _BEFORE)
        one, other = one[begin:], other[begin:]
    more = "…" if begin else ""
    return more + _short(one), more + _short(other)


def _short(value: object) -> str:
    shown = repr(value[: _SHOWN + 1] if isinstance(value, str | bytes) else value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {_short(value)}")
    return value


def _whole(value: object) -> int:
    # A bool is an int to isinstance.
    if type(value) is not int or not 0 <= value <= HIGHEST:
        raise ValueError(f"expected a whole number of 0 to {HIGHEST}, got {_short(value)}")
    return value


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {_short(value)}")
    return value


def _items(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {_short(value)}")
    return value


_CHECKS: Final = {
    "str": _text,
    "str | None": lambda value: None if value is None else _text(value),
    "int": _whole,
    "bool": _truth,
    "int | None": lambda value: None if value is None else _whole(value),
    "tuple[int, ...]": lambda value: tuple(_whole(item) for item in _items(value)),
    "tuple[str, ...]": lambda value: tuple(_text(item) for item in _items(value)),
    "tuple[str | None, ...]": lambda value: tuple(None if item is None else _text(item) for item in _items(value)),
    "Done": decode_done,
}
"""By the annotation of a field: what makes its value of what the JSON holds, or raises ``ValueError``."""
