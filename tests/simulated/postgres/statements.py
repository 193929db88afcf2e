"""The statements of the adapter, translated into calls of the server as data.

A statement that the tables lack ends the run, so this module cannot miss a new statement of the adapter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, LiteralString

from psycopg import sql

from lanes.core.ring import slot
from lanes_postgres import advisory_locks, dead_letters, lock_session, migrations, states
from lanes_postgres.log import appending, reading, sequencer, trigger
from lanes_postgres.ring import finished_attempts, range_map
from lanes_postgres.ring import pieces as ring_pieces
from lanes_postgres.ring import reading as ring_reading
from lanes_postgres.ring import unowned as ring_unowned
from lanes_postgres.steps import compose, compose_names
from lanes_postgres.subscription import kept, members, starts, visitor
from tests.simulated.postgres import pieces
from tests.simulated.postgres.log import StoredRow
from tests.simulated.postgres.server import Session
from tests.simulated.postgres.states import StateRow, claim, store

SCHEMA: Final = "lanes"
LOG: Final = "orders"
INCARNATION: Final = "1"

Rows = list[tuple[Any, ...]]
Answer = Callable[[Session, Any, float], Rows | None]
"""A function that performs a statement with its parameters at a time. None = the statement returns no rows."""


def perform(session: Session, query: bytes, parameters: Any, now: float) -> Rows | None:
    """Perform one statement. Raises ``Blocked`` and ``UniqueViolation``."""
    for beginning, answer in _BEGINNINGS.items():
        if query.startswith(beginning):
            return answer(session, query, now)
    assert query in _ANSWERS, f"tests.simulated.postgres.statements has no answer to {query.decode()}"
    return _ANSWERS[query][1](session, parameters, now)


def call_of(query: bytes) -> str:
    """Return the name of a statement, for the faults of a run."""
    return _ANSWERS[query][0] if query in _ANSWERS else "other"


def text_of(query: object) -> bytes:
    """Return a query as the client sends it."""
    if isinstance(query, sql.Composable):
        return query.as_bytes(None)
    return query.encode() if isinstance(query, str) else bytes(query)  # type: ignore[call-overload]


# --- sessions and transactions


def _begin(session: Session, query: Any, now: float) -> None:
    session.begin()


def _commit(session: Session, query: Any, now: float) -> None:
    session.commit()


def _roll_back(session: Session, query: Any, now: float) -> None:
    session.roll_back()


def _listen(session: Session, query: Any, now: float) -> None:
    session.listens = True


def _unlisten(session: Session, query: Any, now: float) -> None:
    session.listens = False


def _set(session: Session, query: Any, now: float) -> None:
    """Accept a setting. The server as data has only the shortest timeout of a lock, and one of idle transactions.

    A wait for the map is longer than the timeout of an idle transaction, so it needs no timeout.
    """
    session.waits = session.waits and (b"lock_timeout" not in query or b"lock_timeout TO '5s'" in query)
    if b"SET LOCAL idle_in_transaction_session_timeout TO '5s'" in query:
        session.in_transaction_timeout = 5.0


def _nothing(session: Session, query: Any, now: float) -> None:
    """Accept the reset of a setting that the server as data does not have."""


_BEGINNINGS: Final[dict[bytes, Answer]] = {
    b"BEGIN": _begin,
    b"COMMIT": _commit,
    b"ROLLBACK": _roll_back,
    b"LISTEN ": _listen,
    b"UNLISTEN ": _unlisten,
    b"SET ": _set,
    b"RESET ": _nothing,
}


# --- locks


def _prepare(session: Session, parameters: Any, now: float) -> Rows:
    (timeout,) = parameters
    session.timeout = float(timeout.removesuffix("ms")) / 1000
    return [(timeout, False, session.pid)]


def _pid(session: Session, parameters: Any, now: float) -> Rows:
    return [(session.pid,)]


def _try(session: Session, parameters: Any, now: float) -> Rows:
    return [(session.try_lock(parameters[0]), session.pid)]


def _unlock(session: Session, parameters: Any, now: float) -> Rows:
    return [(session.unlock(parameters[0]),)]


def _unlock_all(session: Session, parameters: Any, now: float) -> Rows:
    session.unlock_all()
    return [("",)]


def _verify(session: Session, parameters: Any, now: float) -> Rows:
    return [(session.pid, f"{round(session.timeout * 1000)}ms", session.locked() or None)]


# --- states


def state_key(subscription: str, source: str, partition: int, incarnation: str) -> tuple[Any, ...]:
    """Return the key of a state."""
    return "state", subscription, source, int(partition), incarnation


def _array(runs: tuple[tuple[int, int], ...]) -> str:
    return "{" + ",".join(f"{start},{end}" for start, end in runs) + "}"


def _runs(array: str) -> tuple[tuple[int, int], ...]:
    bounds = [int(bound) for bound in array.strip("{}").split(",") if bound]
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


def _read(session: Session, parameters: Any, now: float) -> Rows:
    found = [
        (index, row.epoch, row.floor, _array(row.completed))
        for index, key in enumerate(zip(*parameters, strict=True), start=1)
        if (row := session.get(state_key(*key))) is not None
    ]
    return [tuple(map(list, zip(*found, strict=True)))] if found else [(None, None, None, None)]


def _claim(session: Session, parameters: Any, now: float) -> Rows:
    *key, start = parameters
    row = claim(session, state_key(*key), int(start))
    return [(row.epoch, row.floor, _array(row.completed))]


def _store(session: Session, parameters: Any, now: float) -> Rows:
    changes = list(zip(*parameters, strict=True))
    for *key, _, _, _ in changes:
        session.lock_row(state_key(*key))
    stored = [
        index
        for index, (*key, epoch, floor, completed) in enumerate(changes, start=1)
        if store(session, state_key(*key), StateRow(epoch, floor, _runs(completed)))
    ]
    return [(stored or None,)]


def _lock_state(session: Session, parameters: Any, now: float) -> Rows:
    key = state_key(*parameters)
    session.lock_row(key)
    row = session.get(key)
    return [] if row is None else [(row.epoch,)]


# --- the log


def _log(session: Session, parameters: Any, now: float) -> Rows:
    return [(1, len(session.server.log.ends), INCARNATION, None)] if parameters == (LOG,) else []


def _sequence(session: Session, parameters: Any, now: float) -> Rows:
    return [(session.server.sequence(session),)]


def _look(session: Session, parameters: Any, now: float) -> Rows:
    done = session.server.sequence(session)
    return [(done, session.server.log.ends)]


def _visit(session: Session, parameters: Any, now: float) -> Rows:
    log, room = session.server.log, parameters["room"]
    rows: Rows = [(session.server.sequence(session), log.ends, *[None] * 7)]
    starts = list(zip(_numbers(parameters["numbers"]), _numbers(parameters["starts"]), strict=True))
    if sum(max(0, log.ends[partition] - start) for partition, start in starts) <= room:
        rows += [
            (None, None, partition, position, row.key, row.subject, None, row.value, row.time)
            for partition, start in sorted(starts)
            for position, row in log.read(partition, start, room)
        ]
    return rows


def _numbers(array: str) -> list[int]:
    return [int(number) for number in array.strip("{}").split(",") if number]


def _trigger(session: Session, parameters: Any, now: float) -> Rows:
    return [("O", True)]


def _lags(session: Session, parameters: Any, now: float) -> Rows:
    """Return nothing, as for a log without a subscription, because no run judges the kept messages."""
    return []


def _wanted(parameters: Any) -> list[tuple[int, int, int]]:
    return list(zip(parameters["partitions"], parameters["starts"], parameters["mosts"], strict=True))


def _fetch(session: Session, parameters: Any, now: float) -> Rows:
    return [
        (partition, position, row.key, row.subject, None, row.value, row.time)
        for partition, start, most in _wanted(parameters)
        for position, row in session.server.log.read(partition, start, most)
    ]


def _oldest(session: Session, parameters: Any, now: float) -> Rows:
    return [
        (partition, row.time)
        for partition, start, most in _wanted(parameters)
        for _, row in session.server.log.read(partition, start, most)
    ]


def _ends(session: Session, parameters: Any, now: float) -> Rows:
    return [(end,) for end in session.server.log.ends]


def _firsts(session: Session, parameters: Any, now: float) -> Rows:
    return [(first,) for first in session.server.log.firsts]


def _since(session: Session, parameters: Any, now: float) -> Rows:
    return [*session.server.log.since(parameters["time"].timestamp()).items()]


# --- subscriptions


def subscription_key(log: int, name: str) -> tuple[Any, ...]:
    """Return the key of a subscription, whose row has its start, the first positions and whether it has ranges."""
    return "subscription", int(log), name


def _find_start(session: Session, parameters: Any, now: float) -> Rows:
    row = session.get(subscription_key(*parameters))
    if row is None:
        return []
    start, first, ring = row
    return [(start, first, False, ring)]


def _lock_until_commit(session: Session, parameters: Any, now: float) -> Rows:
    session.lock_until_commit(tuple(parameters))
    return [("",)]


def _lock_group(session: Session, parameters: Any, now: float) -> Rows:
    *group, rows = parameters
    session.lock_until_commit(tuple(group))
    session.waits = session.waits and rows == "5s"
    return [("", rows)]


def _add_start(session: Session, parameters: Any, now: float) -> None:
    log, name, start, first, own_states, ring = parameters
    assert not own_states, "no simulated member has a store of its own"
    session.insert(subscription_key(log, name), (start, list(first), ring))


def _channel(session: Session, parameters: Any, now: float) -> Rows:
    return [("lanes_log_1",)]


def member_key(log: int, subscription: str, member: str) -> tuple[Any, ...]:
    """Return the key of a member, whose row has its partitions, whether the member waits, and its last heartbeat."""
    return "member", int(log), subscription, member


def _members(session: Session, parameters: Any, now: float) -> Rows:
    log, subscription, member = parameters["log"], parameters["subscription"], parameters["member"]
    session.put(member_key(log, subscription, member), (int(parameters["owned"]), parameters["waits"], now))
    return _others(session, parameters, now)


def _others(session: Session, parameters: Any, now: float) -> Rows:
    log, subscription, member = parameters["log"], parameters["subscription"], parameters["member"]
    of = member_key(log, subscription, "")[:3]
    return [
        (owned, waits)
        for key, (owned, waits, seen) in _rows_of(session, "member")
        if key[:3] == of and key[3] != member and seen > now - parameters["stale"]
    ]


def _leave(session: Session, parameters: Any, now: float) -> None:
    session.put(member_key(*parameters), None)


def _rows_of(session: Session, kind: str) -> list[tuple[Any, Any]]:
    return [(key, row) for key, row in session.server.rows.items() if isinstance(key, tuple) and key[0] == kind]


# --- ranges


def runs_of(text: str) -> pieces.Runs:
    """Return the runs of a multirange, such as ``{[0,100),[200,65536)}``."""
    return tuple((int(start), int(end)) for start, end in re.findall(r"\[(\d+),(\d+)\)", text))


def _multirange(runs: pieces.Runs | None) -> str | None:
    return None if runs is None else "{" + ",".join(f"[{start},{end})" for start, end in runs) + "}"


def _begun(session: Session, parameters: Any, now: float) -> Rows:
    log, group = parameters
    return [(bool(pieces.pieces_of(session, log, group)),)]


def _begin_pieces(session: Session, parameters: Any, now: float) -> None:
    log, group, starts, slots, consumers = parameters
    parts = [
        (None if text is None else runs_of(text), consumer) for text, consumer in zip(slots, consumers, strict=True)
    ]
    pieces.begin(session, int(log), group, starts, parts)


def _lock_pieces(session: Session, parameters: Any, now: float) -> Rows:
    return [(pieces.lock(session, *parameters),)]


def _place(parameters: Any) -> tuple[int, str, int, int, str]:
    log, group, consumer = parameters["log"], parameters["group"], parameters["consumer"]
    return int(log), group, int(parameters["lo"]), int(parameters["hi"]), consumer


def _copy(session: Session, parameters: Any, now: float) -> None:
    pieces.copy(session, *_place(parameters))


def _cut(session: Session, parameters: Any, now: float) -> None:
    log, group, lo, hi, _ = _place(parameters)
    pieces.cut(session, log, group, lo, hi)


def _move(session: Session, parameters: Any, now: float) -> None:
    pieces.move(session, *_place(parameters))


def _look_at_pieces(session: Session, parameters: Any, now: float) -> Rows:
    return [
        (piece, row.partition, _multirange(row.slots), row.consumer, row.epoch, row.parent, row.floor)
        for piece, row in pieces.look(session, *parameters)
    ]


def _claim_piece(session: Session, parameters: Any, now: float) -> Rows:
    row = pieces.claim(session, *parameters)
    return [] if row is None else [(row.epoch, row.floor, _array(row.completed), _multirange(row.slots))]


def _end_drain(session: Session, parameters: Any, now: float) -> None:
    pieces.end_drain(session, *parameters)


def _store_pieces(session: Session, parameters: Any, now: float) -> Rows:
    changes = [
        pieces.StoredPiece(piece, epoch, floor, _runs(completed))
        for piece, epoch, floor, completed in zip(*parameters, strict=True)
    ]
    return [(pieces.store(session, changes) or None,)]


def _lock_free(session: Session, parameters: Any, now: float) -> Rows:
    return [(pieces.lock_free(session, *parameters) or None,)]


def _epochs(session: Session, parameters: Any, now: float) -> Rows:
    found = pieces.epochs(session, *parameters)
    return [tuple(map(list, zip(*found, strict=True)))] if found else [(None, None)]


def _hand_over(session: Session, parameters: Any, now: float) -> None:
    slots, below = runs_of(parameters["slots"]), int(parameters["below"])
    pieces.hand_over(session, int(parameters["id"]), int(parameters["epoch"]), slots, below)


def _hand_over_all(session: Session, parameters: Any, now: float) -> None:
    pieces.hand_over_all(session, list(zip(*parameters, strict=True)))


def _no_attempts(session: Session, parameters: Any, now: float) -> Rows:
    """Return no attempt, because the members of a run share a store in memory."""
    return []


def _unowned(session: Session, parameters: Any, now: float) -> Rows:
    log, group = parameters["log"], parameters["group"]
    found = pieces.unowned(session, log, group, slot, parameters["look"], parameters["ends"])
    return [tuple(each) for each in found]


def _pass_over(session: Session, parameters: Any, now: float) -> None:
    pieces.pass_over(session, zip(*parameters, strict=True))


def _notify(session: Session, parameters: Any, now: float) -> Rows:
    session.notify("ring")
    return [("",)]


def _history(session: Session, parameters: Any, now: float) -> Rows:
    log, group = parameters
    rows = sorted(row for key, row in session.rows("assignment") if key[1:3] == (int(log), group))
    return [tuple(map(list, zip(*rows, strict=True)))] if rows else [(None,) * 6]


def _append_assignment(session: Session, parameters: Any, now: float) -> None:
    log, group, number, lo, hi, consumer = parameters
    time = datetime.fromtimestamp(now, UTC)
    row = int(number), int(lo), int(hi), consumer, time, session.owner
    session.insert(("assignment", int(log), group, int(number)), row)


def _fetch_slots(session: Session, parameters: Any, now: float) -> Rows:
    names = "partitions", "starts", "ends", "mosts", "slots", "keyless"
    firsts = session.server.log.firsts
    found: Rows = []
    wanted = zip(*(parameters[name] for name in names), strict=True)
    for turn, (partition, start, end, most, slots, keyless) in enumerate(wanted, start=1):
        runs = runs_of(slots)
        messages = [
            (position, row.key, row.subject, None, row.value, row.time)
            for position, row in session.server.log.read(partition, start, end - start)
            if position < end
            and (keyless if row.key is None else any(first <= slot(row.key) < after for first, after in runs))
        ]
        found += [(turn, firsts[partition], *message) for message in messages[:most]]
        if not messages:
            found.append((turn, firsts[partition], *(None,) * 6))
    return found


# --- tables and dead letters


def _is_there(session: Session, parameters: Any, now: float) -> Rows:
    return [(True, True)]


def _version(session: Session, parameters: Any, now: float) -> Rows:
    return [(len(migrations.migrations()),)]


def _put(session: Session, parameters: Any, now: float) -> None:
    key = "letter", parameters["box"], parameters["id"]
    if session.get(key) is None:
        session.put(key, (parameters["record"], parameters["value"]))


_OF_A_SCHEMA: Final[tuple[tuple[LiteralString, str, Answer], ...]] = (
    (migrations._IS_THERE, "other", _is_there),
    (migrations._VERSION, "other", _version),
    (appending._FIND, "other", _log),
    (sequencer._SEQUENCE, "look", _sequence),
    (sequencer._LOOK, "look", _look),
    (reading._VISIT, "look", _visit),
    (reading._FETCH, "read", _fetch),
    (reading._OLDEST, "read", _oldest),
    (reading._ENDS, "look", _ends),
    (reading._FIRSTS, "other", _firsts),
    (reading._SINCE, "other", _since),
    (starts._FIND, "start", _find_start),
    (starts._ADD, "start", _add_start),
    (members._MEMBERS, "members", _members),
    (members._OTHERS, "members", _others),
    (members._LEAVE, "other", _leave),
    (kept._LAGS, "other", _lags),
    (states._READ, "read states", _read),
    (states._CLAIM, "claim", _claim),
    (states._STORE, "store", _store),
    (states._LOCK, "store", _lock_state),
    (dead_letters._PUT, "letter", _put),
    (ring_pieces._BEGUN, "other", _begun),
    (ring_pieces._BEGIN, "start", _begin_pieces),
    (ring_pieces._LOCK, "assign", _lock_pieces),
    (ring_pieces._COPY, "assign", _copy),
    (ring_pieces._CUT, "assign", _cut),
    (ring_pieces._MOVE, "assign", _move),
    (ring_pieces._LOOK, "pieces", _look_at_pieces),
    (ring_pieces._END_DRAIN, "end drain", _end_drain),
    (ring_pieces._STORE, "store", _store_pieces),
    (ring_pieces._LOCK_FREE, "store", _lock_free),
    (ring_pieces._EPOCHS, "store", _epochs),
    (ring_pieces._HAND_OVER, "hand over", _hand_over),
    (ring_pieces._HAND_OVER_ALL, "hand over", _hand_over_all),
    (finished_attempts._DROP, "other", _no_attempts),
    (ring_unowned._COUNT, "other", _unowned),
    (ring_unowned._RAISE, "other", _pass_over),
    (range_map._HISTORY, "assign", _history),
    (range_map._APPEND, "assign", _append_assignment),
    (ring_reading._FETCH, "read", _fetch_slots),
)
_OF_THE_SERVER: Final[tuple[tuple[LiteralString, str, Answer], ...]] = (
    (starts._LOCK, "start", _lock_until_commit),
    (ring_pieces._GROUP_LOCK, "start", _lock_group),
    (trigger._FIND, "other", _trigger),
    (lock_session._PREPARE, "verify", _prepare),
    (lock_session._PID, "verify", _pid),
    (advisory_locks._TRY, "lock", _try),
    (advisory_locks._UNLOCK, "unlock", _unlock),
    (advisory_locks._UNLOCK_ALL, "unlock", _unlock_all),
    (advisory_locks._VERIFY, "verify", _verify),
)
_ANSWERS: Final[dict[bytes, tuple[str, Answer]]] = {
    **{compose(text, SCHEMA): (call, answer) for text, call, answer in _OF_A_SCHEMA},
    **{text.encode(): (call, answer) for text, call, answer in _OF_THE_SERVER},
    compose_names(visitor._CHANNEL, SCHEMA): ("other", _channel),
    compose_names(ring_pieces._CLAIM, SCHEMA): ("claim", _claim_piece),
    compose_names(ring_pieces._NOTIFY, SCHEMA): ("notify", _notify),
    b"BEGIN": ("begin", _begin),
    b"COMMIT": ("commit", _commit),
}

__all__ = ["INCARNATION", "LOG", "SCHEMA", "StoredRow", "call_of", "member_key", "perform", "state_key", "text_of"]
