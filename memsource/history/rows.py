"""One row of a history, and the parser that turns a JSON object into a row.

The parser checks every field that it reads, because a file may have any content. The parser ignores unknown events and
extra fields, which a later version of ``lanes`` may write in the same format.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Final, NamedTuple, get_args, get_type_hints

from lanes.history.rules import Rules
from lanes.history.writer import KEY_DIGITS, MEMBER

Fields = dict[str, object]

NUMBER_LIMIT: Final = 1 << 64
TIME_LIMIT: Final = 1e15
TEXT_LIMIT: Final = 256

_KEY: Final = re.compile(rf"[0-9a-f]{{{KEY_DIGITS}}}")

# event -> the field that becomes a row's ``text``, and the field that becomes its ``number``; "" = no field
_MESSAGE: Final[dict[str, tuple[str, str]]] = {
    **dict.fromkeys(
        ("started", "dlq_sent", "dlq_confirmed", "archived", "blocked", "ack", "abandoned", "zombie", "published"),
        ("", ""),
    ),
    "delivered": ("", "size"),
    "redelivered": ("cause", ""),
    "ended": ("result", ""),
    "retry": ("", "delay"),
    "publishing": ("", "count"),
    "publish_failed": ("error", ""),
}
_COUNT: Final = r"(0|[1-9][0-9]{0,14})"
_SECONDS: Final = r"((?:0|[1-9][0-9]{0,13})\.[0-9]+)"
_TEXT: Final = r'"([^"\\\x00-\x1f]+)"'
# The form of nearly all lines of ``lanes.history.recorder``. The pattern matches only lines whose values are in bounds
# and that a JSON parser reads with the same result.
_USUAL: Final = re.compile(
    rf'{{"n":{_COUNT},"event":"(started|ack|(ended)|(delivered))","member":{_TEXT},"mono":{_SECONDS},"wall":{_SECONDS},'
    rf'"partition":{_TEXT},"assignment":{_COUNT},"position":{_COUNT},"key":(?:null|"([0-9a-f]{{{KEY_DIGITS}}})"),'
    rf'"attempt":{_COUNT}(?(3),"result":"(ok)")(?(4),"size":{_COUNT})}}\n'
)
_OWNERSHIP: Final = frozenset(
    {"assigned", "leased", "revoking", "hastened", "drained", "revoked", "lost", "ahead_left"}
)
_LEASE: Final = frozenset({"leased", "lost"})
_DRAIN: Final = frozenset({"revoking", "hastened"})
_COMMIT: Final = frozenset({"commit_sent", "commit_ok", "commit_failed"})
_OTHER: Final[dict[str, tuple[str, str]]] = {
    "end": ("reason", ""),
    "paused": ("", "in_flight"),
    "resumed": ("", "in_flight"),
    "dropped": ("", "count"),
}
EVENTS: Final = frozenset(
    {*_MESSAGE, *_OWNERSHIP, *_COMMIT, *_OTHER, "begin", "produced", "unblocked", "extended", "ahead_reached"}
)
"""The events that this version reads."""

_RULES: Final[dict[str, tuple[type, ...]]] = {
    name: (int, float) if float in get_args(hint) else get_args(hint)[:1]
    for name, hint in get_type_hints(Rules).items()
}


class Row(NamedTuple):
    """One row of a history. A field that the row's event does not use has its default.

    Attributes:
        n: Number of the row in its segment, from 1.
        event: Name of the event.
        mono: Monotonic time, in seconds.
        partition: Name of the partition, such as ``"STREAM/0"``.
        assignment: Number of the assignment within the process, from 1.
        position: Position of the message.
        key: Digest of the key; None = no key.
        attempt: Number of the attempt.
        text: Cause, result, reason or incarnation of the event; ``"asked"`` for a retry that the handler asked for.
        number: Size, delay or count of the event, or an epoch. For a drain, the timeout in seconds; -1 = unknown. For a
            lease, the deadline; 0 = no deadline.
        floor: Next position to read, in a commit or in an assignment of a source that commits.
        bytes: Bytes in flight.
        runs: First and last position of each range of an ``extended`` row.
        queue: Number and name of the physical queue of an assigned partition, such as ``"1 of orders"``; "" = none.
    """

    n: int
    event: str
    mono: float
    partition: str = ""
    assignment: int = 0
    position: int = -1
    key: str | None = None
    attempt: int = 0
    text: str = ""
    number: float = 0
    floor: int = -1
    bytes: float = 0
    runs: tuple[tuple[int, int], ...] = ()
    queue: str = ""


@cache
def whole(partition: str) -> str:
    """Return the name of a whole partition: of ``"orders/0"`` itself, and of its piece ``"orders/0#17"``."""
    source, slash, number = partition.rpartition("/")
    return source + slash + number.partition("#")[0]


def is_piece(partition: str) -> bool:
    """Return whether a name is the name of a piece of a partition, such as ``"orders/0#17"``."""
    return whole(partition) != partition


def piece_of(partition: str) -> int:
    """Return the number of a piece, such as 17 of ``"orders/0#17"``; 0 for a whole partition."""
    return int(partition.removeprefix(whole(partition)).removeprefix("#") or 0)


def number_of(partition: str) -> int:
    """Return the number of a partition."""
    return int(whole(partition).rpartition("/")[2])


class RowParser:
    """The parser of rows. Rows with equal texts share one str object."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._keys: dict[str, str] = {}

    def usual(self, line: str, n: int, member: str) -> tuple[Row, float] | None:
        """Return the row and ``wall`` of a line in the usual form. The line has the number ``n`` and this member.

        Returns None for a line of another form. ``parse`` reads every form, and takes several times as long.
        """
        match = _USUAL.fullmatch(line)
        if match is None:
            return None
        number, event, _, _, of, mono, wall, where, assignment, position, key, attempt, result, size = match.groups()
        if of != member or int(number) != n:
            return None
        return (
            Row(
                n,
                sys.intern(event),
                float(mono),
                self._texts.setdefault(where, where),
                int(assignment),
                int(position),
                None if key is None else self._keys.setdefault(key, key),
                int(attempt),
                "" if result is None else "ok",
                0 if size is None else int(size),
            ),
            float(wall),
        )

    def parse(self, n: int, event: str, mono: float, fields: Fields) -> Row | None:
        """Return the row with these fields; None = unknown event.

        Raises ``ValueError`` or ``LookupError`` for fields that do not fit the event.
        """
        details = _MESSAGE.get(event)
        if details is not None:
            assignment, position, attempt = fields["assignment"], fields["position"], fields["attempt"]
            if type(assignment) is not int or type(position) is not int or type(attempt) is not int:
                raise ValueError("numbers")
            if not 0 <= position < NUMBER_LIMIT:
                raise ValueError("position")
            return Row(
                n,
                event,
                mono,
                self._partition(fields),
                assignment,
                position,
                self._key(fields),
                attempt,
                self.text(fields[details[0]]) if details[0] else "asked" if fields.get("asked") else "",
                _quantity(fields[details[1]]) if details[1] else 0,
            )
        if event in _OWNERSHIP:
            assignment = whole_number(fields["assignment"])
            incarnation = self.text(fields.get("incarnation", ""))
            floor = whole_number(fields["floor"]) if "floor" in fields else -1
            number = _timeout(fields) if event in _DRAIN else 0
            queue = ""
            if event == "assigned":
                number = whole_number(fields["epoch"])
                if "queue" in fields:
                    place = f"{whole_number(fields['queue_partition'])} of {_name(fields['queue'])}"
                    queue = self._texts.setdefault(place, place)
            elif event in _LEASE and "deadline" in fields:
                number = _quantity(fields["deadline"])
            partition = self._partition(fields)
            return Row(n, event, mono, partition, assignment, text=incarnation, number=number, floor=floor, queue=queue)
        if event in _COMMIT:
            assignment, floor = whole_number(fields["assignment"]), whole_number(fields["floor"])
            number = whole_number(fields["completed"]) if event == "commit_sent" else 0
            return Row(n, event, mono, self._partition(fields), assignment, number=number, floor=floor)
        if event == "unblocked":
            return Row(n, event, mono, key=self._key(fields), number=whole_number(fields["count"]))
        if event == "extended":
            assignment = whole_number(fields["assignment"])
            return Row(n, event, mono, self._partition(fields), assignment, runs=_runs(fields["runs"]))
        if event == "ahead_reached" and "position" not in fields:
            return Row(n, event, mono, self._partition(fields), whole_number(fields["assignment"]))
        if event in ("ahead_reached", "produced"):
            assignment = 0 if event == "produced" else whole_number(fields["assignment"])
            position = whole_number(fields["position"])
            return Row(n, event, mono, self._partition(fields), assignment, position, self._key(fields))
        details = _OTHER.get(event)
        if details is None:
            return None
        text = self.text(fields[details[0]]) if details[0] else ""
        size = _quantity(fields.get("bytes", 0))
        return Row(n, event, mono, text=text, number=_quantity(fields[details[1]]) if details[1] else 0, bytes=size)

    def times(self, fields: Fields) -> tuple[float, float]:
        """Return ``mono`` and ``wall`` in seconds. Raises ``ValueError`` or ``LookupError``."""
        return _quantity(fields["mono"]), _quantity(fields["wall"])

    def member(self, fields: Fields) -> str:
        """Return the name of the member. Raises ``ValueError`` or ``LookupError``."""
        member = self.text(fields["member"])
        if not MEMBER.fullmatch(member):
            raise ValueError("member")
        return member

    def text(self, value: object) -> str:
        """Return a short text. Raises ``ValueError`` for any other value."""
        if type(value) is not str or len(value) > TEXT_LIMIT:
            raise ValueError("text")
        return self._texts.setdefault(value, value)

    def _partition(self, fields: Fields) -> str:
        partition = _name(fields["partition"])
        return self._texts.setdefault(partition, partition)

    def _key(self, fields: Fields) -> str | None:
        key = fields["key"]
        if key is None:
            return None
        if type(key) is not str:
            raise ValueError("key")
        known = self._keys.get(key)
        if known is None:
            if not _KEY.fullmatch(key):
                raise ValueError("key")
            known = self._keys[key] = key
        return known


def whole_number(value: object) -> int:
    """Return a whole number of 0 or more. Raises ``ValueError`` for any other value."""
    if type(value) is not int or not 0 <= value < NUMBER_LIMIT:
        raise ValueError("number")
    return value


def _quantity(value: object) -> float:
    # NaN fails the comparison.
    if (type(value) is not float and type(value) is not int) or not 0 <= value < TIME_LIMIT:
        raise ValueError("quantity")
    return value


def _name(value: object) -> str:
    if type(value) is not str or not value:
        raise ValueError("name")
    return value


def _timeout(fields: Fields) -> float:
    return _quantity(fields["timeout"]) if "timeout" in fields else -1


def _runs(value: object) -> tuple[tuple[int, int], ...]:
    """Return rising pairs of positions. Raises ``ValueError`` for any other value."""
    if type(value) is not list:
        raise ValueError("runs")
    runs = []
    latest = -1
    for pair in value:
        if type(pair) is not list or len(pair) != 2:
            raise ValueError("run")
        first, last = whole_number(pair[0]), whole_number(pair[1])
        if not latest < first <= last:
            raise ValueError("run")
        runs.append((first, last))
        latest = last
    return tuple(runs)


def rules_of(fields: Fields) -> Rules:
    """Return the rules in a ``begin`` row. Raises ``ValueError`` for an invalid value."""
    found: dict[str, object] = {}
    for name, types in _RULES.items():
        if name not in fields:
            continue
        value = fields[name]
        if type(value) not in types:
            raise ValueError(name)
        if type(value) is str:
            if len(value) > TEXT_LIMIT:
                raise ValueError(name)
        elif type(value) is not bool:
            _quantity(value)
        found[name] = value
    return Rules(**found)  # type: ignore[arg-type]
