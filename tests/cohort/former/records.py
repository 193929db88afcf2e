"""The records of a cohort's bucket: their keys, and their values as JSON.

| key | value | expires |
|---|---|---|
| ``config`` | ``CohortConfig``, never changed | no |
| ``plan`` | ``PlanRecord`` | no |
| ``m.<member>`` | ``Heartbeat`` | yes |
| ``l.<partition>`` | ``Lease`` | yes |
| ``s.<partition>`` | ``State`` | no |
| ``drain.<member>`` | ``DrainRequest`` of an operator | no |

Other programs may write to the bucket. For a value that ``lanes`` does not write, ``decode`` raises a ``ValueError``
with key and remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, TypeVar

from lanes.core.cohort.ledger import SHOWN, Done, decode_done, encode_done, shown

VERSION: Final = 1

CONFIG_KEY: Final = "config"
PLAN_KEY: Final = "plan"
MEMBER_PREFIX: Final = "m."
LEASE_PREFIX: Final = "l."
STATE_PREFIX: Final = "s."
DRAIN_PREFIX: Final = "drain."

HIGHEST: Final = 2**53
"""Highest number in a record, except in a ledger. Some JSON readers change higher numbers.

A clock in milliseconds reaches this number after 285,000 years.
"""

DEFAULT_NAME: Final = "default"
"""Name of a cohort whose first member has no name for it."""

_NAME: Final = re.compile(r"[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=-]+)*")
_NAME_LIMIT: Final = 128
_BEFORE: Final = 20
"""Number of characters shown before the first difference of two long texts."""


@dataclass(frozen=True, slots=True)
class CohortConfig:
    """The settings that a cohort never changes. Every joining member compares all settings but ``start`` with its own.

    A field is ``None``, and is not compared, if an earlier version of ``lanes`` wrote the record without the field.

    Attributes:
        cohort: Name of the cohort. A member with the name None joins a cohort of any name.
        partitions: Number of cohort partitions.
        choice: Origin of the cohort partitions: ``transform`` (of the stream), ``created`` (with the stream) or
            ``sourced`` (from another stream).
        detail: Details of ``choice`` as text, such as the destination of the transform.
        tokens: Numbers of the subject tokens that make the key, from 1.
        incarnation: Text that distinguishes a recreated stream from the former stream.
        retention: Retention of the stream.
        start: Start of the first epoch in the stream, as the user's setting.
        stream: Name of the stream.
        namespace: Namespace of the cohort.
        lease: Length of every member's leases in seconds.
    """

    cohort: str | None
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
    """The current plan.

    Attributes:
        generation: Number of the plan, which rises whenever owners or standbys change.
        owners: Member that owns each partition; None = no owner.
        members: Live members, sorted.
        standbys: Live members that own no partition and do not drain, sorted.
        target: Maximum number of members that own partitions; None = all members.
        under_provisioned: Whether the number of live members that do not drain is below the target.
    """

    generation: int
    owners: tuple[str | None, ...]
    members: tuple[str, ...]
    standbys: tuple[str, ...]
    target: int | None
    under_provisioned: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A live member.

    Attributes:
        nonce: Random text that identifies the process. Different nonces under one name show that two processes
            use the same member id.
        weight: Weight of the member, 1 or more.
        target: Maximum number of members that own partitions. ``None`` = all members.
        session: Time of the join in milliseconds since 1970, by the member's clock; for the status only.
        lease: Seconds until the heartbeat expires. ``None`` = an earlier version of ``lanes`` wrote the heartbeat.
    """

    nonce: str
    weight: int
    target: int | None
    session: int
    lease: int | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of a partition.

    Attributes:
        member: Member that holds the lease.
        nonce: Random text that identifies the acquisition.
        epoch: Epoch of the acquisition. ``None`` = not chosen yet.
        released: Whether the member has given the lease back.
    """

    member: str
    nonce: str
    epoch: int | None = None
    released: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """The last epoch and the done sequences of a partition. The record outlives every lease."""

    epoch: int
    done: Done


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """The request that a member owns no partition while a member that does not drain lives.

    Attributes:
        since: Time of the request in milliseconds since 1970.
    """

    since: int


Record = CohortConfig | PlanRecord | Heartbeat | Lease | State | DrainRequest
_R = TypeVar("_R", bound=Record)


def lease_key(partition: int) -> str:
    """Return the key of a partition's lease."""
    return f"{LEASE_PREFIX}{partition}"


def state_key(partition: int) -> str:
    """Return the key of a partition's state."""
    return f"{STATE_PREFIX}{partition}"


def member_key(member: str) -> str:
    """Return the key of a member's heartbeat. Raises ``ValueError`` for an invalid name."""
    return MEMBER_PREFIX + check_name("member", member)


def drain_key(member: str) -> str:
    """Return the key of the request to drain a member. Raises ``ValueError`` for an invalid name."""
    return DRAIN_PREFIX + check_name("member", member)


def check_name(what: str, name: str) -> str:
    """Return a name that may be part of a key. Raises ``ValueError`` for an invalid name."""
    if len(name) > _NAME_LIMIT or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"the {what} name {shown(name)} cannot be part of a key; use letters, digits, '_', '-' and '=', with "
            f"single dots between them, at most {_NAME_LIMIT} characters"
        )
    return name


def encode(record: Record) -> bytes:
    """Return the value of a record."""
    content: dict[str, Any] = {"version": VERSION}
    if isinstance(record, State):
        content |= {"epoch": record.epoch, "done": encode_done(record.done)}
    else:
        content |= asdict(record)
    return json.dumps(content, separators=(",", ":")).encode()


def decode(kind: type[_R], key: str, value: bytes) -> _R:
    """Return the record in a value.

    Raises ``ValueError`` with key and remedy for a value that ``encode`` does not return. The call ignores unknown
    fields, and raises for another ``version``.
    """
    try:
        content = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _not_ours(key, value, f"it is not JSON ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise _not_ours(key, value, "it is not an object")
    version = content.get("version")
    if version != VERSION:
        raise _not_ours(key, value, f"its version is {shown(version)}, and this program knows {VERSION}")
    found: dict[str, Any] = {}
    for field in fields(kind):
        try:
            found[field.name] = _CHECKS[str(field.type)](content.get(field.name))
        except ValueError as error:
            raise _not_ours(key, value, f"{field.name}: {error}") from None
    return kind(**found)


def difference(found: CohortConfig, wanted: CohortConfig) -> str | None:
    """Return the differences between the settings of a joining member and its cohort, with the remedy, or None."""
    differing = {
        field.name: "{} is {}, this member has {}".format(field.name, *_apart(there, here))
        for field in fields(CohortConfig)
        if field.name != "start"
        and (there := getattr(found, field.name)) != (here := getattr(wanted, field.name))
        and not (field.default is None and None in (there, here))
        and not (field.name == "cohort" and here is None)
    }
    if not differing:
        return None
    said = "; ".join(differing.values())
    if differing.keys() & {"stream", "namespace"}:
        return f"the bucket belongs to another cohort, {found.cohort!r}: {said}. Use another namespace for this cohort"
    where = f" (stream {wanted.stream!r}, namespace {wanted.namespace!r})" if wanted.stream is not None else ""
    said = f"the cohort {found.cohort!r} has other settings{where}: {said}. "
    if "incarnation" in differing:
        return (
            f"{said}The stream was deleted and created again, so its sequences mean other messages. If that was "
            "intended, stop all members, delete the cohort's bucket, and start them again; or give this member another "
            "namespace"
        )
    said += "Give this member the same settings, or another namespace for a cohort of its own"
    if differing.keys() & {"partitions", "choice", "detail", "tokens"}:
        said += (
            ". If the stream is now divided differently, divide it as before: stored messages keep their partition, "
            "and a key in two partitions has two owners"
        )
    if "lease" in differing:
        said += (
            f". To change the lease of all members, stop them, delete the key {CONFIG_KEY!r} of the cohort's bucket, "
            "and start them with the new lease"
        )
    return said


def _not_ours(key: str, value: bytes, why: str) -> ValueError:
    return ValueError(
        f"the key {key!r} of the cohort's bucket holds {shown(value)}: {why}. Run the same version of lanes on every "
        "member, and let no other program write to the bucket; restore a damaged record by hand"
    )


def _apart(one: object, other: object) -> tuple[str, str]:
    """Return two differing values as texts, cut so that both show the difference."""
    begin = 0
    if isinstance(one, str) and isinstance(other, str) and max(len(one), len(other)) > SHOWN:
        pairs = enumerate(zip(one, other, strict=False))
        same = next((index for index, (here, there) in pairs if here != there), min(len(one), len(other)))
        begin = max(0, same - _BEFORE)
        one, other = one[begin:], other[begin:]
    more = "…" if begin else ""
    return more + shown(one), more + shown(other)


def _of_type(kind: type, name: str) -> Callable[[object], Any]:
    """Make the check of a JSON value by its type."""

    def check(value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError(f"expected {name}, got {shown(value)}")
        return value

    return check


_text: Final = _of_type(str, "text")
_items: Final = _of_type(list, "a list")


def _whole(value: object) -> int:
    # A bool is an int to isinstance.
    if type(value) is not int or not 0 <= value <= HIGHEST:
        raise ValueError(f"expected a whole number from 0 to {HIGHEST}, got {shown(value)}")
    return value


_CHECKS: Final = {
    "str": _text,
    "str | None": lambda value: None if value is None else _text(value),
    "int": _whole,
    "bool": _of_type(bool, "true or false"),
    "int | None": lambda value: None if value is None else _whole(value),
    "tuple[int, ...]": lambda value: tuple(_whole(item) for item in _items(value)),
    "tuple[str, ...]": lambda value: tuple(_text(item) for item in _items(value)),
    "tuple[str | None, ...]": lambda value: tuple(None if item is None else _text(item) for item in _items(value)),
    "Done": decode_done,
}
"""The function that checks and converts a JSON value, by the annotation of its field."""
