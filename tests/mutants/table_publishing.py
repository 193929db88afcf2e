"""Mutants of the outputs of handlers, found by the campaign that copies messages."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant

PUBLISHING: Final = (
    Mutant(
        "failed_attempt_publishes",
        "lanes.workers.outcomes",
        "            self._outputs.drop(message)\n",
        "            pass\n",
        "the outputs of a failed attempt leave with those of the next attempt",
        "publishing",
        ("OutputsAtLeastOnce",),
    ),
    Mutant(
        "settled_before_confirmed",
        "lanes.runtime.publishing",
        "            await self._publisher.publish(outputs, report)\n",
        "            [report(each, None) for each in outputs]\n"
        "            await self._publisher.publish(outputs, report)\n",
        "a message is settled when its outputs are sent, before the broker has confirmed them",
        "publishing",
        ("OutputsAtLeastOnce",),
    ),
    Mutant(
        "batch_publishes_at_once",
        "lanes.core.engine",
        "                behind.add(following)\n",
        "                pass\n",
        "the later messages of a batch do not wait for the outputs of an earlier message of their lane",
        "publishing_batches",
        ("OutputOrder",),
        ("modes", "everything_holds", "IllegalTransition", "effects_say_what_happened"),
    ),
    Mutant(
        "lane_free_while_publishing",
        "lanes.core.engine",
        "        self.publishing.begin(message, produced)\n",
        "        self.publishing.begin(message, produced)\n        self.chains.free(message)\n",
        "the next message of a key starts before the outputs of the former one are confirmed",
        "publishing",
        ("PerKeyOrder", "OutputOrder"),
        ("engine", "one_message_of_a_key_is_on_its_way", "take", "nothing_is_lost", "teardown"),
    ),
    Mutant(
        "drain_drops_outputs",
        "lanes.core.lane",
        "UNENDED: Final = frozenset({RUNNING, PUBLISHING, PUBLISH_HELD, HANDLED})",
        "UNENDED: Final = frozenset({RUNNING})",
        "a drain gives up messages whose outputs are not confirmed, so that their handlers run again",
        "publishing",
        ("GivenUpOutputs",),
        ("engine", "effects_say_what_happened", "give_up", "nothing_is_lost"),
    ),
)
