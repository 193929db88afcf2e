"""The mutants of the runtime: mistakes in the code that drives the engine."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant

RUNTIME: Final = (
    Mutant(
        "settle_not_cancelled",
        "lanes.runtime.settle",
        "                scope.cancel()",
        "                pass",
        "a commit that is under way when its partition goes undoes one of the next owner",
        "kafka",
        ("NoCommitAfterLoss",),
    ),
    Mutant(
        "worker_swallows_cancellation",
        "lanes.workers.tasks",
        '                        reporter.finish(message, ABANDON, "cancelled", error, handling)',
        "                        engine.finish(message, ACK, 0.0)",
        "a handler that was cancelled counts as one that has ended well",
        "jetstream",
        ("NoSettleBeforeEnd", "ZombiesDoNotCount"),
    ),
    Mutant(
        "drain_forgets_a_partition",
        "lanes.runtime.run",
        "        for partition in list(self.engine.partitions.values()):\n            self._start_drain",
        "        for partition in list(self.engine.partitions.values())[:1]:\n            self._start_drain",
        "a stop drains one partition of several",
        "jetstream",
        ("StopEnds",),
    ),
    Mutant(
        "drained_unsettled",
        "lanes.runtime.handover",
        "            await self._settler.settle_all(partition)\n",
        "",
        "a partition is handed over before what has finished is committed",
        "kafka",
        ("NoDuplicateCleanly",),
    ),
    Mutant(
        "stop_leaves_a_task",
        "lanes.runtime.run",
        "            self._tasks.cancel_scope.cancel()",
        "            self._receiving.cancel()",
        "when all is drained the consumer's tasks stay",
        "jetstream",
        ("StopEnds",),
    ),
    Mutant(
        "redelivery_runs_twice",
        "lanes.runtime.run",
        "                engine.receive(event.partition, event.run, event.size, now)\n",
        "                engine.receive(event.partition, event.run, event.size, now)\n"
        "                self.engine.chains.ready.extend(self.engine.chains.ready)\n",
        "what is ready is taken twice",
        "jetstream",
        ("NoOverlap", "RunsOnce"),
    ),
    Mutant(
        "drained_handlers_go_on",
        "lanes.runtime.handover",
        "                self._workers.cancel(partition)\n",
        "",
        "handlers that have used up the drain of their partition are not cancelled",
        "jetstream",
        ("NoOverlap",),
    ),
    Mutant(
        "closing_goes_on",
        "lanes.core.drain",
        "            self.abandoned = self.engine.stop_closing(self.partition)\n",
        "",
        "when a drain has used up its time, what was to close the prefix still starts",
        "kafka",
        ("DrainStartsNothing", "OneTerminalOutcome"),
    ),
    Mutant(
        "due_too_early",
        "lanes.runtime.run",
        "            self.engine.due(now)\n",
        "            due = self.engine.next_due()\n            due < float('inf') and self.engine.due(due)\n",
        "what was held goes on before its time has come",
        "jetstream",
        ("RetryHoldsLane",),
    ),
    Mutant(
        "commit_wakes_nobody",
        "lanes.runtime.settle",
        "wait for this commit.\n                self.wake()\n",
        "wait for this commit.\n",
        "what finished while a drain's commit was under way is not committed",
        "kafka",
        ("CaughtUp", "CommitsInTime"),
    ),
    Mutant(
        "extension_misses_queued",
        "lanes.runtime.settle",
        "            messages = self._engine.in_flight_since(self._clock() - period)",
        "            messages = [m for m in self._engine.in_flight_since(self._clock() - period) if m.state == 2]",
        "what does not run yet comes again, behind the ack wait",
        "jetstream",
        ("KeptAlive",),
    ),
    Mutant(
        "extension_too_late",
        "lanes.runtime.settle",
        "        period = interval / 2",
        "        period = interval * 4",
        "messages are kept alive when the broker has given them up",
        "jetstream",
        ("KeptAlive",),
    ),
)
