"""Mutations that change no behaviour, each with the reason.

``make mutants`` fails for an entry that names no mutation, and for one that a test kills.

This file is longer than most, because each mutation has a reason of its own.
"""

# ruff: noqa: E501 - a change is quoted in one line

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Equivalent:
    """A mutation without an effect that a test could see.

    Attributes:
        file: Path of the file, relative to the project.
        function: Qualified name of the function.
        change: The change, as ``make mutants`` prints it.
        reason: Why the behaviour is the same.
    """

    file: str
    function: str
    change: str
    reason: str


EQUIVALENTS: Final = (
    Equivalent(
        "lanes/cohort/keeper.py",
        "LeaseKeeper.__init__",
        'self._revoked: Literal["no", "asked", "answered"] = "no" → self._revoked: Literal["no", "asked", "answered"] = None',
        "The first event sets the field, and no partition is drained before its acquisition.",
    ),
    Equivalent(
        "lanes/cohort/keeper.py",
        "LeaseKeeper.__init__",
        'self._revoked: Literal["no", "asked", "answered"] = "no" → self._revoked: Literal["no", "asked", "answered"] = "XXnoXX"',
        "The first event sets the field, and no partition is drained before its acquisition.",
    ),
    Equivalent(
        "lanes/cohort/keeper.py",
        "LeaseKeeper.__init__",
        "self._waits = 0.0 # the awaited lease that was logged, in seconds → self._waits = 1.0 # the awaited lease that was logged, in seconds",
        "An awaited lease is longer than the member's own lease of 3 s or more.",
    ),
    Equivalent(
        "lanes/cohort/keeper.py",
        "LeaseKeeper.serve",
        "patience = wait if 0 < wait < math.inf else math.inf → patience = wait if 0 < wait <= math.inf else math.inf",
        "A wait without an end is no limit either way.",
    ),
    Equivalent(
        "lanes/cohort/membership.py",
        "Membership._planned",
        "for keeper, owner in zip(self._keepers, plan.owners, strict=True): → for keeper, owner in zip(self._keepers, plan.owners, ):",
        "A plan of another number of partitions is refused when it is read.",
    ),
    Equivalent(
        "lanes/cohort/roster.py",
        "Roster._create_consumer",
        'refused: ConsumerExists | None = None → refused: ConsumerExists | None = ""',
        "Each try without a success sets the error before it is read.",
    ),
    Equivalent(
        "lanes/core/chains.py",
        "Chains.__init__",
        "self.relabels = not self._key or self._keyless is not None or self._lanes > 0 → self.relabels = not self._key or self._keyless is not None or self._lanes >= 0",
        "With no fewer lanes than 0, relabel changes no lane.",
    ),
    Equivalent(
        "lanes/core/chains.py",
        "Chains.abandon",
        "message.next = message.next.next → message.next = None",
        "The messages after an abandoned one of a lane have higher positions, so they are abandoned too.",
    ),
    Equivalent(
        "lanes/core/chains.py",
        "Chains.insert",
        "below = [m for m in others if m not in started and m.position < message.position] → below = [m for m in others if m not in started and m.position <= message.position]",
        "No other queued message has the position of the late message.",
    ),
    Equivalent(
        "lanes/core/chains.py",
        "Chains.prefix",
        "limit = max(started, default=-1) → limit = max(started, default=-2)",
        "The limit is at least that of last_finished, which is -1 or more.",
    ),
    Equivalent(
        "lanes/core/chains.py",
        "Chains.prefix",
        "while message is not None and message.position < limit: → while message is not None and message.position <= limit:",
        "A message at the limit has started, and later messages of a lane have higher positions.",
    ),
    Equivalent(
        "lanes/core/cohort/held_lease.py",
        "HeldLease.__init__",
        'self._unsure: float | None = None → self._unsure: float | None = ""',
        "renewed sets the field.",
    ),
    Equivalent(
        "lanes/core/cohort/held_lease.py",
        "HeldLease.__init__",
        "self.revision = revision → self.revision = None",
        "renewed sets the revision.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine.__init__",
        'self._claim = ("", 0.0) # nonce and time of the acquisition under way → self._claim = ("XXXX", 0.0) # nonce and time of the acquisition under way',
        "ACQUIRING sets the claim before it is read.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine.__init__",
        "self._epoch = 0 → self._epoch = None",
        "FINDING sets the epoch before it is read.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine.__init__",
        "self._free_revision = 0 → self._free_revision = 1",
        "LOOKING sets the revision before it is read.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine.__init__",
        "self._free_revision = 0 → self._free_revision = None",
        "LOOKING sets the revision before it is read.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine.__init__",
        "self._state = _NO_STATE → self._state = None",
        "READING sets the state before it is read.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine.__init__",
        "self._sub = 0 → self._sub = 1",
        "FINDING sets the sub-number before it is read.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine.__init__",
        "self._sub = 0 → self._sub = None",
        "FINDING sets the sub-number before it is read.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine.__init__",
        'self._then: Handler | None = None → self._then: Handler | None = ""',
        "next sets the handler with each action, before apply reads it.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine.__init__",
        "self._waited = False # whether the wait was long enough to trust that a state is missing → self._waited = True # whether the wait was long enough to trust that a state is missing",
        "_look sets the field before it is read.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine._action",
        'f"cohort partition {self.partition}: no step is known while {self.phase}; a bug of lanes, please report it" ) → None )',
        "No phase is without a step.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine._below",
        "return sorted(consumer[:2] for consumer in found.consumers if consumer[:2] < (self._epoch, self._sub)) → return sorted(consumer[:2] for consumer in found.consumers if consumer[:3] < (self._epoch, self._sub))",
        "A longer tuple with an equal beginning is no lower.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine._choose",
        "action = self._action(now, nonce) → action = self._action(None, nonce)",
        "_acquired replaces the time of the claim before it is read.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine._found",
        "known = max(self._state.epoch, highest.epoch if highest else 0) → known = max(self._state.epoch, highest.epoch if highest else 1)",
        "The clock of a server is above 1 ms.",
    ),
    Equivalent(
        "lanes/core/cohort/lease_machine.py",
        "LeaseMachine._looked",
        'self._step("held") → pass',
        "The event held leads from LOOKING to LOOKING.",
    ),
    Equivalent(
        "lanes/core/cohort/plan.py",
        "_total",
        "return sum(quotas.values(), Fraction()) → return sum(quotas.values(), )",
        "A sum of fractions from 0 is equal to one from Fraction().",
    ),
    Equivalent(
        "lanes/core/commits.py",
        "Committer._admit",
        "if len(run) > space: → if len(run) >= space:",
        "A run as long as the space is cut to itself.",
    ),
    Equivalent(
        "lanes/core/commits.py",
        "Committer.confirmed",
        "if partition not in self.ahead or self._space(ledger, commits) <= 0: → if partition not in self.ahead or self._space(ledger, commits) < 0:",
        "Without space, no message is admitted.",
    ),
    Equivalent(
        "lanes/core/engine.py",
        "Engine._failed",
        'self.halted |= follows == "halt" → self.halted = follows == "halt"',
        "A policy either halts or blocks.",
    ),
    Equivalent(
        "lanes/core/engine.py",
        "Engine._receive_draining",
        "self._redelivered(ledger, message, 0.0) → self._redelivered(ledger, message, None)",
        "The time of a known message is not read.",
    ),
    Equivalent(
        "lanes/core/engine.py",
        "Engine.available",
        "if count >= limit: → if count > limit:",
        "The loop over the chain ends at the limit, so only time passes.",
    ),
    Equivalent(
        "lanes/core/lane.py",
        "StoppedLanes.__init__",
        "self._order: int = 0 → self._order: int = 1",
        "The order numbers only rise.",
    ),
    Equivalent(
        "lanes/core/lane.py",
        "StoppedLanes._push",
        "self._order += 1 → self._order += 2",
        "The order numbers only rise.",
    ),
    Equivalent(
        "lanes/core/ledgers.py",
        "AckLedger._tidy",
        "above = deque(zip(starts[first:], ends[first:], strict=True)) → above = deque(zip(starts[first:], ends[first:], strict=False))",
        "The two lists have equal lengths.",
    ),
    Equivalent(
        "lanes/core/ledgers.py",
        "AckLedger._tidy",
        "above = deque(zip(starts[first:], ends[first:], strict=True)) → above = deque(zip(starts[first:], ends[first:], strict=None))",
        "The two lists have equal lengths.",
    ),
    Equivalent(
        "lanes/core/ledgers.py",
        "AckLedger._tidy",
        "while above and above[0][0] < start: → while above and above[0][0] <= start:",
        "No run begins at a position that is not settled yet.",
    ),
    Equivalent(
        "lanes/core/ledgers.py",
        "AckLedger.settle",
        "if len(self._loose) > self._loose_limit: → if len(self._loose) >= self._loose_limit:",
        "The positions enter the runs one message earlier.",
    ),
    Equivalent(
        "lanes/core/ledgers.py",
        "OffsetLedger._seed",
        "while passed < len(seeded) and seeded[passed][1] <= self.highest + 1: → while passed < len(seeded) and seeded[passed][1] < self.highest + 1:",
        "completed ignores a run that ends there.",
    ),
    Equivalent(
        "lanes/core/ledgers.py",
        "OffsetLedger.completed",
        "if end < 0: → if end <= 0:",
        "The end lies after a start of 0 or more.",
    ),
    Equivalent(
        "lanes/core/ledgers.py",
        "OffsetLedger.drop_waiting",
        "self._trailing = -1 → self._trailing = -2",
        "Every floor is above both numbers.",
    ),
    Equivalent(
        "lanes/core/ledgers.py",
        "OffsetLedger.floor",
        "if first > _TRIM and first * 2 > len(self._open): → if first > _TRIM and first * 3 > len(self._open):",
        "Only the time of the trimming differs.",
    ),
    Equivalent(
        "lanes/core/offset_map.py",
        "_bitmap",
        'digits = bytearray(b"0" * (8 * size)) → digits = bytearray(b"0" * (9 * size))',
        "More zeros above the highest digit change no number.",
    ),
    Equivalent(
        "lanes/core/offset_map.py",
        "_data",
        'return b"" → return b"XXXX"',
        "decode encodes the runs again, and ignores a text that differs.",
    ),
    Equivalent(
        "lanes/core/offset_map.py",
        "_data",
        'return int(digits[: 8 * size], 2).to_bytes(size, "big") → return int(digits[: 8 * size], 2).to_bytes(size, )',
        "The default byte order is big.",
    ),
    Equivalent(
        "lanes/core/offset_map.py",
        "_from_list",
        "for distance, length in zip(numbers[::2], numbers[1::2], strict=False): → for distance, length in zip(numbers[::2], numbers[1::2], strict=None):",
        "Both values are false.",
    ),
    Equivalent(
        "lanes/core/offset_map.py",
        "_text",
        'digits = f"{int.from_bytes(data, \'big\'):0{8 * len(data)}b}".ljust(count * _CHARACTER_BITS, "0") → digits = f"{int.from_bytes(data, ):0{8 * len(data)}b}".ljust(count * _CHARACTER_BITS, "0")',
        "The default byte order is big.",
    ),
    Equivalent(
        "lanes/core/types.py",
        "key_bytes",
        'found = "is below 0" if key < 0 else f"has {key.bit_length()} bits" → found = "is below 0" if key <= 0 else f"has {key.bit_length()} bits"',
        "A key of 0 is not refused.",
    ),
    Equivalent(
        "adapters/lanes_jetstream/durable/source.py",
        "DurableSource.__post_init__",
        'self._partition: Partition | None = None → self._partition: Partition | None = ""',
        "open sets the partition before it is read.",
    ),
    Equivalent(
        "adapters/lanes_jetstream/durable/takeover.py",
        "Takeover.__post_init__",
        "self._again = False → self._again = True",
        "The first takeover has a reason, and a new reason sets the field before it is read.",
    ),
    Equivalent(
        "adapters/lanes_jetstream/durable/takeover.py",
        "Takeover.__post_init__",
        "self._lost_at = -1 → self._lost_at = -2",
        "A number of reconnects is 0 or more.",
    ),
    Equivalent(
        "adapters/lanes_jetstream/durable/takeover.py",
        "Takeover.run",
        'self._last_failure = "" → self._last_failure = "XXXX"',
        "The text of a failure is neither value.",
    ),
    Equivalent(
        "adapters/lanes_jetstream/durable/takeover.py",
        "Takeover.run",
        'self._last_failure = "" → self._last_failure = None',
        "The text of a failure is neither value.",
    ),
    Equivalent(
        "adapters/lanes_jetstream/wire/acks.py",
        "Acks.__init__",
        'self._inbox = "" → self._inbox = None',
        "The first confirmed settlement replaces each false value.",
    ),
    Equivalent(
        "adapters/lanes_jetstream/wire/acks.py",
        "Acks.__init__",
        "self._number = 0 → self._number = 1",
        "The numbers only have to differ.",
    ),
    Equivalent(
        "adapters/lanes_jetstream/cohort/owned_partition.py",
        "Backlog.__init__",
        "self._highest = 0 → self._highest = None",
        "The first report sets the field, and a removal is found by a later report.",
    ),
    Equivalent(
        "adapters/lanes_jetstream/durable/consumer.py",
        "DurableConsumer.max_ack_pending",
        'bound = int(self.config.get("max_ack_pending", -1)) → bound = int(self.config.get("max_ack_pending", -2))',
        "Each number below 1 stands for no limit.",
    ),
    Equivalent(
        "adapters/lanes_jetstream/durable/takeover.py",
        "Takeover.__post_init__",
        'self._reason: Interruption | None = None → self._reason: Interruption | None = ""',
        "A first takeover without an interruption has no missing delivery.",
    ),
    Equivalent(
        "adapters/lanes_postgres/lock_session.py",
        "LockSession.ask",
        "cursor = AsyncCursor(self.connection, row_factory=tuple_row) → cursor = AsyncCursor(self.connection, row_factory=None)",
        "The connection itself makes tuples.",
    ),
    Equivalent(
        "adapters/lanes_postgres/lock_session.py",
        "LockSession.ask",
        "cursor = AsyncCursor(self.connection, row_factory=tuple_row) → cursor = AsyncCursor(self.connection, )",
        "The connection itself makes tuples.",
    ),
    Equivalent(
        "adapters/lanes_postgres/lock_session.py",
        "SessionMaker._prepare",
        "cursor = AsyncCursor(connection, row_factory=tuple_row) → cursor = AsyncCursor(connection, row_factory=None)",
        "The connection itself makes tuples.",
    ),
    Equivalent(
        "adapters/lanes_postgres/lock_session.py",
        "SessionMaker._prepare",
        "cursor = AsyncCursor(connection, row_factory=tuple_row) → cursor = AsyncCursor(connection, )",
        "The connection itself makes tuples.",
    ),
    Equivalent(
        "adapters/lanes_postgres/lock_session.py",
        "SessionMaker.__init__",
        'timeout = str(given.get("connect_timeout", "")) → timeout = str(given.get("connect_timeout", None))',
        "An absent value and a value that is no number mean the same time.",
    ),
    Equivalent(
        "adapters/lanes_postgres/lock_session.py",
        "SessionMaker.__init__",
        'timeout = str(given.get("connect_timeout", "")) → timeout = str(given.get("connect_timeout", ))',
        "An absent value and a value that is no number mean the same time.",
    ),
    Equivalent(
        "adapters/lanes_postgres/lock_session.py",
        "SessionMaker.__init__",
        'timeout = str(given.get("connect_timeout", "")) → timeout = str(given.get("connect_timeout", "XXXX"))',
        "An absent value and a value that is no number mean the same time.",
    ),
    Equivalent(
        "adapters/lanes_postgres/subscription/owned.py",
        "Owned.lost",
        "if deadline > self.partition.deadline: → if deadline >= self.partition.deadline:",
        "An equal deadline is stored again.",
    ),
    Equivalent(
        "adapters/lanes_postgres/subscription/visits.py",
        "in_order",
        "return sorted(works, key=lambda work: work.partition) → return sorted(works, )",
        "A tuple begins with its partition, and no partition occurs twice.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/commits.py",
        "Commits._offset",
        "kept = decode(text, floor, 1 << 63) → kept = decode(text, floor, 1 << 64)",
        "No offset is so far above a position.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/commits.py",
        "can_carry",
        "return bool(encode(0, [(1, 2)], room)) → return bool(encode(1, [(1, 2)], room))",
        "Both texts have the same length.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/group.py",
        "Group.apply_pauses",
        "self.set_paused(client, resumed, False) → self.set_paused(client, resumed, None)",
        "Both values are false.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/membership.py",
        "Membership._take",
        "members = {each.member_id for each in future.result(0).members} → members = {each.member_id for each in future.result(1).members}",
        "The answer has arrived, so nothing waits for it.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/membership.py",
        "SessionWatch.refresh",
        "found = {entry.name: entry.value for entry in asked.result(0).values() if entry.value is not None} → found = {entry.name: entry.value for entry in asked.result(1).values() if entry.value is not None}",
        "The answer has arrived, so nothing waits for it.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/prefetch.py",
        "Prefetched._shares",
        "range(len(available), 0, -1), sorted(available, key=available.__getitem__), strict=True ): → range(len(available), 0, -1), sorted(available, key=available.__getitem__), ):",
        "The two have equal lengths.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/prefetch.py",
        "Prefetched._shares",
        "range(len(available), 0, -1), sorted(available, key=available.__getitem__), strict=True ): → range(len(available), 0, -1), sorted(available, key=available.__getitem__), strict=None ):",
        "The two have equal lengths.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/prefetch.py",
        "Prefetched._shares",
        "range(len(available), 0, -1), sorted(available, key=available.__getitem__), strict=True → range(len(available), 0, -1), sorted(available, key=available.__getitem__), strict=False",
        "The two have equal lengths.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/retention.py",
        "LogRetention._take",
        "self._note(assignment, int(answer.result(0).offset), end, now) → self._note(assignment, int(answer.result(1).offset), end, now)",
        "The answer has arrived, so nothing waits for it.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/retention.py",
        "LogRetention._take",
        "self._note(assignment, int(answer.result(0).offset), end, now) → self._note(assignment, int(answer.result(None).offset), end, now)",
        "The answer has arrived, so nothing waits for it.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/thread.py",
        "ClientThread.outage",
        'return self._topics.contact.outage(*(self.last_error() or ("", None))) → return self._topics.contact.outage(*(self.last_error() or ("XXXX", None)))',
        "An error without an age is ignored.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/topics.py",
        "Topics.__post_init__",
        "self._next = self._given_up_at = self._asked_at = 0.0 → self._next = self._given_up_at = self._asked_at = 1.0",
        "The clock of a machine that runs is above 1 s.",
    ),
    Equivalent(
        "adapters/lanes_kafka/client/topics.py",
        "Topics._similar",
        'return "" if self.admin is None else similar_topic(self.admin, topic, timeout=_TIMEOUT) → return "XXXX" if self.admin is None else similar_topic(self.admin, topic, timeout=_TIMEOUT)',
        "The topics are checked before the close.",
    ),
    Equivalent(
        "lanes/core/cohort/records.py",
        "_apart",
        "begin = 0 → begin = None",
        "No begin is as false as the begin 0.",
    ),
    Equivalent(
        "lanes/core/cohort/records.py",
        "_apart",
        "pairs = enumerate(zip(one, other, strict=False)) → pairs = enumerate(zip(one, other, strict=None))",
        "Texts of two lengths are compared either way.",
    ),
    Equivalent(
        "lanes/core/cohort/records.py",
        "_apart",
        "pairs = enumerate(zip(one, other, strict=False)) → pairs = enumerate(zip(one, other, ))",
        "Without the argument, zip is not strict.",
    ),
    Equivalent(
        "lanes/core/flow.py",
        "Flow.admit",
        "if self.in_flight > self.peak: → if self.in_flight >= self.peak:",
        "An equal peak is stored again.",
    ),
    Equivalent(
        "lanes/core/flow.py",
        "Flow.admit",
        "if self.bytes > self.peak_bytes: → if self.bytes >= self.peak_bytes:",
        "An equal peak is stored again.",
    ),
    Equivalent(
        "lanes/core/flow.py",
        "Flow.release",
        "if not self.taking and self.in_flight <= self.low and self.bytes <= self.max_bytes // 2: → if not self.taking and self.in_flight <= self.low and self.bytes <= self.max_bytes / 2:",
        "A whole number is at most the half exactly if it is at most the half rounded down.",
    ),
    Equivalent(
        "lanes/core/snapshot.py",
        "_ledger_state",
        "settled = tuple(zip(ledger._starts, ledger._ends, strict=True)) → settled = tuple(zip(ledger._starts, ledger._ends, strict=None))",
        "Each run has a start and an end.",
    ),
    Equivalent(
        "lanes/core/snapshot.py",
        "_ledger_state",
        "settled = tuple(zip(ledger._starts, ledger._ends, strict=True)) → settled = tuple(zip(ledger._starts, ledger._ends, ))",
        "Each run has a start and an end.",
    ),
    Equivalent(
        "lanes/core/snapshot.py",
        "_ledger_state",
        "settled = tuple(zip(ledger._starts, ledger._ends, strict=True)) → settled = tuple(zip(ledger._starts, ledger._ends, strict=False))",
        "Each run has a start and an end.",
    ),
    Equivalent(
        "lanes/core/snapshot.py",
        "restore",
        "if state.budgets is not None and isinstance(engine, PartitionBudgetEngine): → if state.budgets is not None or isinstance(engine, PartitionBudgetEngine):",
        "An engine has budgets exactly if its state has them, because both come from the policy.",
    ),
    Equivalent(
        "lanes/core/snapshot.py",
        "restore",
        "partition.tails = engine.chains.tails.get(partition.id.whole, partition.tails) → partition.tails = engine.chains.tails.get(partition.id.whole, None)",
        "An owned partition has an entry. A handler without one ends in no lane, and reads no tails.",
    ),
    Equivalent(
        "lanes/core/snapshot.py",
        "restore",
        "partition.tails = engine.chains.tails.get(partition.id.whole, partition.tails) → partition.tails = engine.chains.tails.get(partition.id.whole, )",
        "An owned partition has an entry. A handler without one ends in no lane, and reads no tails.",
    ),
    Equivalent(
        "lanes/core/snapshot.py",
        "restore",
        "stopped._heap = [(until, order, messages[head]) for order, (until, head) in enumerate(state.holds, 1)] → stopped._heap = [(until, order, messages[head]) for order, (until, head) in enumerate(state.holds, )]",
        "Orders from 0 are below that of the next hold too.",
    ),
    Equivalent(
        "lanes/core/snapshot.py",
        "restore",
        "heapify(stopped._heap) → pass",
        "The holds of a state are sorted, and a sorted list is a heap.",
    ),
    Equivalent(
        "lanes/core/types.py",
        "key_bytes",
        'found = "is below 0" if key < 0 else f"has {key.bit_length()} bits" → found = "is below 0" if key < 1 else f"has {key.bit_length()} bits"',
        "The key 0 has an encoding.",
    ),
)
