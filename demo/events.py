"""The event log: read from a file, or generated in the same format.

A log is JSON lines (gzip or plain), one event each: ``time`` (ISO 8601), ``case`` (the key), ``step`` (0, 1, 2 …
within its case), ``activity``, ``role``, ``amount``. The demo checks all events of the run before it starts a process.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

from demo.errors import DemoError

CASE: Final = re.compile(r"[^\s.*>\x00-\x1f\x7f]{1,128}")
"""Pattern of a case: one token of a NATS subject, without blanks, dots, wildcards or control characters."""

FIELDS: Final[dict[str, tuple[type, ...]]] = {
    "time": (str,),
    "case": (str,),
    "step": (int,),
    "activity": (str,),
    "role": (str,),
    "amount": (int, float),
}

LENGTHS: Final = {
    5: 5147, 6: 2430, 4: 1439, 8: 410, 9: 293, 3: 222, 1: 134, 10: 83, 7: 79, 11: 53,
    12: 38, 13: 15, 14: 6, 17: 3, 15: 2, 16: 1, 18: 1, 24: 1,
}  # fmt: skip
"""Number of steps of a case -> number of cases, as in two years of a university's expense declarations."""

GENERATED_EVENTS: Final = sum(steps * cases for steps, cases in LENGTHS.items())

_FIRST_DAY: Final = datetime(2017, 1, 9, 8, tzinfo=UTC)
_CASE_EVERY: Final = timedelta(hours=1.7)
_STEP_AFTER: Final = timedelta(hours=60)
"""Mean time between two steps of a case. With ``_CASE_EVERY`` it interleaves about 500 cases in 2,000 events."""

_FIRST: Final = ("Declaration SUBMITTED by EMPLOYEE", "EMPLOYEE")
_BETWEEN: Final = (
    ("Declaration APPROVED by ADMINISTRATION", "ADMINISTRATION"),
    ("Declaration APPROVED by BUDGET OWNER", "BUDGET OWNER"),
    ("Declaration FINAL_APPROVED by SUPERVISOR", "SUPERVISOR"),
    ("Declaration REJECTED by ADMINISTRATION", "ADMINISTRATION"),
    ("Declaration REJECTED by EMPLOYEE", "EMPLOYEE"),
)
_LAST: Final = (("Request Payment", "UNDEFINED"), ("Payment Handled", "UNDEFINED"))


class Event(NamedTuple):
    """One event: its case, its step within the case, and the published JSON."""

    case: str
    step: int
    payload: bytes


def load(path: Path | None, limit: int | None, seed: int) -> list[Event]:
    """Return the first ``limit`` events of a file, or a generated log of ``limit`` events; None = all events.

    Blocks. Raises ``DemoError`` for an unreadable or empty log, and for a wrong line, which the error names.
    """
    if path is None:
        return generate(GENERATED_EVENTS if limit is None else limit, seed)
    events = []
    try:
        for event in read(path):
            events.append(event)
            if len(events) == limit:
                break
    except FileNotFoundError:
        raise DemoError(f"{path}: no such file; correct --data, or leave out --data for a generated log") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DemoError(
            f"{path}: the gzip data is damaged after event {len(events)} ({error}); copy the file again"
        ) from None
    except OSError as error:
        raise DemoError(f"{path}: cannot be read ({error.strerror}); correct --data, or leave out --data") from None
    if not events:
        raise DemoError(f"{path}: has no event; pass a log with one JSON object a line, or leave --data out")
    return events


def read(path: Path) -> Iterator[Event]:
    """Yield the events of a log. Raises ``DemoError`` for a wrong line.

    Raises ``OSError`` for an unreadable log, and ``EOFError`` or ``zlib.error`` for damaged gzip data.
    """
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    following: dict[str, int] = {}
    with gzip.open(path, "rb") if compressed else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            event = _parse(line.rstrip(b"\r\n"), f"{path}:{number}")
            expected = following.get(event.case, 0)
            if event.step != expected:
                raise DemoError(
                    f"{path}:{number}: case {event.case!r} has step {event.step} instead of step {expected}: "
                    "sort the log by time, and number the steps of each case 0, 1, 2 …"
                )
            following[event.case] = expected + 1
            yield event


def _parse(line: bytes, where: str) -> Event:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DemoError(f"{where}: not JSON ({error}): {_shown(line)}; write one JSON object on each line") from None
    if not isinstance(fields, dict):
        raise DemoError(f"{where}: not a JSON object: {_shown(line)}; write one JSON object on each line")
    for name, kinds in FIELDS.items():
        if name not in fields:
            raise DemoError(f"{where}: the field {name!r} is missing; write the fields {', '.join(FIELDS)}")
        value = fields[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise DemoError(f"{where}: {name}={_shown(value)} is {type(value).__name__}, must be {wanted}")
    if not CASE.fullmatch(fields["case"]):
        raise DemoError(
            f"{where}: case={_shown(fields['case'])} cannot be a token of a subject: use 1 to 128 "
            "characters without blanks, dots, * and >"
        )
    return Event(fields["case"], fields["step"], line)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def generate(count: int, seed: int) -> list[Event]:
    """Generate events of interleaved cases with the lengths in ``LENGTHS``. Equal arguments make equal events."""
    chance = random.Random(seed)
    starts: list[tuple[datetime, str, int]] = []
    lengths: list[int] = []
    remaining = count
    start = _FIRST_DAY
    while remaining > 0:
        if not lengths:
            lengths = [steps for steps, cases in LENGTHS.items() for _ in range(cases)]
            chance.shuffle(lengths)
        steps = min(lengths.pop(), remaining)
        remaining -= steps
        starts.append((start, f"declaration{100_000 + len(starts)}", steps))
        start += _CASE_EVERY * chance.expovariate(1.0)
    rows: list[tuple[datetime, str, int, int, float]] = []
    for begun, case, steps in starts:
        time = begun
        amount = round(chance.lognormvariate(4.0, 1.2), 2)
        for step in range(steps):
            rows.append((time, case, step, steps, amount))
            time += _STEP_AFTER * chance.expovariate(1.0)
    # Events of the same time are sorted by case and step, so that a step never precedes an earlier step.
    rows.sort()
    return [_generated(*row) for row in rows]


def _generated(time: datetime, case: str, step: int, steps: int, amount: float) -> Event:
    behind = steps - step
    if step == 0:
        activity, role = _FIRST
    elif behind <= len(_LAST):
        activity, role = _LAST[-behind]
    else:
        activity, role = _BETWEEN[(step - 1) % len(_BETWEEN)]
    fields = {
        "time": time.isoformat(timespec="milliseconds"),
        "case": case,
        "step": step,
        "activity": activity,
        "role": role,
        "amount": amount,
    }
    return Event(case, step, json.dumps(fields, separators=(",", ":")).encode())
