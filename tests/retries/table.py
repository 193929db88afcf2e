"""Every place of the sources that pauses in a loop: the retry loops that the harness plays, and the other loops."""

from __future__ import annotations

from typing import Final

from tests.retries.harness import LOOPS
from tests.retries.stubs import STUBBED

PLAYED: Final = frozenset({*(loop.place for loop in LOOPS), *(kind.place for kind in STUBBED)})
"""The retry loops, each played with every event at several passes."""

_PERIODIC: Final = "looks at the state periodically until its cancellation, and repeats no failed operation"
_PART: Final = "computes or logs the pause of another place of this table"

OTHERS: Final = {
    "lanes.cohort.keeper:LeaseKeeper.serve": "the lease machine decides each pass; random walks play its events",
    "lanes.cohort.roster:Roster._doubt": _PART,
    "lanes.cohort.roster:Roster.look_at": _PART,
    "lanes.history.parquet:JournalWriter._work": _PERIODIC,
    "lanes.ownership.lease_locks:LeaseLocks._free": "ends at the deadline, after which the lease is free anyway",
    "lanes.ownership.lease_locks:LeaseLocks._keep": "the contract suite of locks plays losses, outages and freezes",
    "lanes.runtime.confirmation:Confirmation.look": _PERIODIC,
    "lanes.runtime.handover:Handover.hand_over": "each pass ends with a drain or a loss; tests/runtime/test_parts.py",
    "lanes.runtime.publishing:OutputSender._apply_reports": "waits for reports of the publisher, and repeats nothing",
    "lanes.runtime.publishing:OutputSender.run": "the engine decides each next send; state machines play them",
    "lanes.runtime.run:Run._watch_intake": _PERIODIC,
    "lanes.runtime.run:Run._watch_retention": _PERIODIC,
    "lanes.runtime.settle:Settler.keep_alive": _PERIODIC,
    "lanes.runtime.settle:Settler.settle_finished": "each pass ends with a drain or a loss; runtime/test_parts.py",
    "lanes.runtime.survivors:survivors": "waits for the end of cancelled handlers, within its limit",
    "lanes.web.port:Port._refresh": _PERIODIC,
    "lanes.web.routes:Routes._snapshots": _PERIODIC,
    "lanes.workers.batches:BatchWorkers._watch": _PERIODIC,
    "lanes.workers.loop_watch:LoopWatch._waits": _PERIODIC,
    "lanes.workers.pool:Pool.watch": _PERIODIC,
    "lanes.workers.processes:ProcessPool._keep": "starts the next process after the end of one; bounded starts in vain",
    "lanes.workers.tasks:TaskWorkers._cancel_late": _PERIODIC,
    "lanes_jetstream.cohort.watch:CohortWatch._run": _PERIODIC,
    "lanes_jetstream.durable.source:DurableSource.receive": "waits for the next messages; a takeover repeats requests",
    "lanes_jetstream.durable.takeover:Takeover._check_unexpired": "waits for messages; the takeover begins again",
    "lanes_jetstream.durable.takeover:Takeover._collect": "waits for messages; the takeover begins its next pass",
    "lanes_jetstream.durable.takeover:Takeover._unfinished": _PART,
    "lanes_jetstream.durable.watch:DurableWatch._run": _PERIODIC,
    "lanes_jetstream.wire.confirmations:Confirmations.publish": "the pause of 0 s is a turn of the loop between sends",
    "lanes_jetstream.wire.connection:Connection.request": "waits for one answer, and sends nothing again",
    "lanes_jetstream.wire.queue_watch:QueueWatch._run": _PERIODIC,
    "lanes_kafka.broker:wait_for": "waits for answers, and sends nothing again",
    "lanes_kafka.cli.queue_survey:Cluster._bounds": "a command asks again while a leader moves, until its deadline",
    "lanes_kafka.cli.queue_survey:Cluster._groups": "a command asks again until its deadline",
    "lanes_kafka.cli.queue_survey:Cluster._of_groups": "a command asks again until its deadline",
    "lanes_kafka.cli.queue_survey:Cluster._until": "a command waits for new topics, until its deadline",
    "lanes_kafka.client.membership:Membership._begin": "the turns of the thread repeat it in simulated schedules",
    "lanes_kafka.client.membership:Membership._take": "the turns of the thread repeat it in simulated schedules",
    "lanes_kafka.client.rebuilds:Rebuilds.__init__": _PART,
    "lanes_kafka.client.rebuilds:Rebuilds.next_pause": _PART,
    "lanes_kafka.client.topics:Topics.appears": "waits for about a second, and fails nothing itself",
    "lanes_kafka.source:KafkaSource.receive": "waits for the events of the client's thread, and sends nothing again",
    "lanes_kafka.transactions.performer:TransactionThread._abort_soon": "ends within about a second, at a stop",
    "lanes_kafka.transactions.performer:TransactionThread._await_callback": "kafka/transactions/test_performer.py",
    "lanes_kafka.transactions.performer:TransactionThread._pause": _PART,
    "lanes_kafka.transactions.performer:TransactionThread._repeat": "kafka/transactions/test_performer.py",
    "lanes_kafka.transactions.performer:TransactionThread._restart_producer": "kafka/transactions/test_kills.py",
    "lanes_kafka.transactions.performer:TransactionThread._start_producer": "kafka/transactions/test_performer.py",
    "lanes_kafka.transactions.performer:TransactionThread._stored": "kafka/transactions/test_performer.py",
    "lanes_postgres.advisory_locks:AdvisoryLocks._connect_again": "the contract suite plays outages on a real server",
    "lanes_postgres.advisory_locks:AdvisoryLocks._within": "waits for one answer, and sends nothing again",
    "lanes_postgres.lock_session:abandon": "waits for the end of a cancelled request",
    "lanes_postgres.advisory_locks:AdvisoryLocks.aclose": "waits for ended sessions, and repeats nothing",
    "lanes_postgres.advisory_locks:AdvisoryLocks.run": "the contract suite plays outages on a real server",
    "lanes_postgres.subscription.piece_visitor:PieceVisitor._confined": "tests/postgres/ring/test_piece_visitor.py",
    "lanes_postgres.subscription.piece_visitor:PieceVisitor._skip": "tests/postgres/ring/test_faulty_pieces.py",
    "lanes_postgres.subscription.starts:decide_starts": "waits while another session gives positions",
    "lanes_postgres.subscription.visitor:Visitor.run": "tests/postgres/log kills its connections on a real server",
    "lanes_spark.driver.progress:Pulse._beat": _PERIODIC,
    "lanes_spark.driver.stream:Stream._watch": _PERIODIC,
    "lanes_spark.task.journal:Pace.wait": _PERIODIC,
}
"""The other places, each with the reason why it is no retry loop or is played elsewhere."""
