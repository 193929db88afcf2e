"""Mutants of ``lanes_jetstream``, which the campaign over the simulated nats-server must find."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant


def _jetstream(name: str, module: str, old: str, new: str, breaks: str, *found_by: str, first: int = 0) -> Mutant:
    full = f"lanes_jetstream.{module}"
    return Mutant(f"js_{name}", full, old, new, breaks, "jetstream_adapter", found_by, first=first)


JETSTREAM: Final = (
    # A fault, and then a second fault that depends on it.
    _jetstream(
        "gap_unseen",
        "cohort.owned_partition",
        "            if not follows(delivery):\n",
        "            if not follows(delivery) and False:\n",
        "a delivery that did not arrive is handled after newer messages of its key",
        "PerKeyOrder",
        "NothingLost",
    ),
    _jetstream(
        "unanswered_lease_is_stored",
        "cohort.lease_store",
        '            why = f"bucket {self._bucket!r}: {what} has no answer ({type(error).__name__})"\n',
        "            if isinstance(error, TimeoutError) and what.startswith('write'):\n"
        "                return {'seq': self._highest}\n"
        '            why = f"bucket {self._bucket!r}: {what} has no answer ({type(error).__name__})"\n',
        "a lease whose renewal has no answer counts as renewed",
        "LeaseCovers",
    ),
    # Conditions that are rarely true together.
    _jetstream(
        "batch_not_requeued",
        "durable.takeover",
        "        if not await self._shrink(count):\n            raise SourceError(\n",
        "        if not self.durable.modifiable:\n            raise SourceError(\n",
        "messages that a takeover drops, because the room is smaller than before, return only after ack_wait",
        "CaughtUp",
        "PerKeyOrder",
    ),
    _jetstream(
        "lease_one_second_short",
        "cohort.lease_store",
        '            headers["Nats-TTL"] = f"{int(ttl)}s"\n',
        '            headers["Nats-TTL"] = f"{max(1, int(ttl) - 1)}s"\n',
        "the lease ends at the server before its owner stops",
        "LeaseCovers",
        "ExclusiveOwner",
        "LeaseHolds",
        "NewestOwner",
        "NoOverlap",
    ),
    _jetstream(
        "finished_not_acknowledged_again",
        "cohort.owned_partition",
        "                self.again.append(raw.reply)\n",
        "                del raw\n",
        "a finished message whose acknowledgement was lost stays unacknowledged",
        "CaughtUp",
    ),
    # A check that every pass of a loop needs.
    _jetstream(
        "second_pass_does_not_shrink",
        "durable.takeover",
        "            if wanted > len(collected) and not await self._shrink(wanted):\n"
        "                await self._hold_back()\n",
        "",
        "a second pass of a takeover collects new messages before unacknowledged ones",
        "PerKeyOrder",
        "CaughtUp",
        first=113,
    ),
    _jetstream(
        "heard_for_ever",
        "wire.pull_requests",
        "            self._heard = False\n            self._last_sign = now\n",
        "            self._last_sign = now\n",
        "after its first message, a consumer notices no silence",
        "CaughtUp",
    ),
    # State of an earlier ownership, connection or takeover.
    _jetstream(
        "gaps_of_all_connections_add_up",
        "durable.takeover",
        "        again = reconnects == self._lost_at\n",
        "        again = self._lost_at >= 0\n",
        "missing deliveries of two connections count as another process",
        "SourceError",
        first=644,
    ),
    _jetstream(
        "ended_request_keeps_its_room",
        "wire.pull_requests",
        '        self.outstanding = max(0, self.outstanding - (number(headers.get("Nats-Pending-Messages")) or 0))\n',
        "",
        "a request that the server has ended counts as open",
        "CaughtUp",
    ),
    _jetstream(
        "expected_before_the_takeover",
        "durable.source",
        "                self._expected = None\n                collected",
        "                collected",
        "the delivery number from before a takeover is expected after it",
        "GapIsReal",
        "SourceError",
        "CaughtUp",
        first=180,
    ),
    _jetstream(
        "backlog_of_the_former_durable",
        "cohort.owned_partition",
        "        self.pulls = pulls\n        self.backlog.begin()\n",
        "        self.pulls = pulls\n",
        "the backlog of a durable is compared with that of the durable before it",
        "MissedIsReal",
        "SourceError",
    ),
    _jetstream(
        "starts_after_the_first",
        "cohort.epoch_consumers",
        "max(1, start))",
        "max(1, start + 1))",
        "the durable of a takeover leaves the first unfinished message out",
        "NothingLost",
        "CaughtUp",
    ),
    # A broker that goes away while a step waits.
    _jetstream(
        "leaderless_is_deleted",
        "cohort.source",
        "            owned.rest()\n            self._cohort_watch.resolve(owned, pulls.consumer)\n",
        '            self._partitions.lose(owned, "its consumer is gone")\n',
        "a partition whose durable has no leader is given up",
        "LossHasReason",
    ),
    _jetstream(
        "temporary_is_deleted",
        "cohort.watch",
        "                if isinstance(error, NoAnswer) or error.temporary:\n"
        "                    await asyncio.sleep(_RETRY_DELAY)\n"
        "                    continue\n"
        "                if error.err_code == codes.CONSUMER_NOT_FOUND:\n",
        "                if isinstance(error, NoAnswer):\n"
        "                    await asyncio.sleep(_RETRY_DELAY)\n"
        "                    continue\n"
        "                if error.temporary or error.err_code == codes.CONSUMER_NOT_FOUND:\n",
        "a partition whose durable has no leader when the member asks is given up",
        "LossHasReason",
    ),
    _jetstream(
        "lost_machine_is_alive",
        "durable.source",
        "            limit = _LOST_MACHINE_WAIT if silent else _OTHER_PROCESS_WAIT\n",
        "            limit = _OTHER_PROCESS_WAIT\n",
        "a process is refused because of the pull requests of a machine that is gone",
        "StartsAlone",
    ),
    _jetstream(
        "unanswered_letter_is_stored",
        "dead_letters.writer",
        "    except (nats.errors.Error, TimeoutError, OSError) as error:\n",
        "    except nats.errors.TimeoutError:\n"
        "        return {}\n"
        "    except (nats.errors.Error, TimeoutError, OSError) as error:\n",
        "a dead letter without an answer of the server counts as stored",
        "LetterIsStored",
    ),
    # A permission, or another process.
    _jetstream(
        "refused_requests_are_unheard",
        "cohort.source",
        '        if denied is not None:\n            raise SourceError(f"{self._name}: {denied}, then start again")\n'
        "        if self.connection",
        "        if self.connection",
        "a member goes on without a permission, and says nothing",
        "RefusedStops",
    ),
    _jetstream(
        "second_start_is_not_refused",
        "durable.presence",
        '            await self._publish(self._subject, f"refuse {rest} {self._name}")\n',
        "            pass\n",
        "two processes that start at once both consume one durable",
        "NoOverlap",
    ),
    # A value that another task changes during an await.
    _jetstream(
        "answer_compared_with_before",
        "durable.watch",
        "        quiet = not before.outstanding and not now.outstanding and before.delivery == now.delivery\n"
        "        if quiet and now.delivery is not None and snapshot.state.deliveries > now.delivery:\n",
        "        quiet = not before.outstanding\n"
        "        if quiet and before.delivery is not None and snapshot.state.deliveries > before.delivery:\n",
        "deliveries during the question to the server count as those of another process",
        "SourceError",
    ),
)
"""Planted mutants."""
