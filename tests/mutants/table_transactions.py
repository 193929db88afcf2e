"""Mutants of the transactions of Kafka, with the tests that must find them; a part of ``table_kafka``."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant

_COVERAGE: Final = "tests/kafka/transactions/test_coverage.py::"
_PERFORMER: Final = "tests/kafka/transactions/test_performer.py::test_"


def _mutant(name: str, module: str, old: str, new: str, breaks: str, *found_by: str) -> Mutant:
    return Mutant(name, f"lanes_kafka.transactions.{module}", old, new, breaks, "kafka", found_by)


TRANSACTIONS: Final = (
    _mutant(
        "offsets_without_outputs",
        "performer",
        "            for output in request.outputs:\n                self._produce(",
        "            for output in ():\n                self._produce(",
        "a position is stored, and the outputs of its messages are lost",
        _PERFORMER + "a_transaction_has_outputs_and_positions",
    ),
    _mutant(
        "stored_set_shrinks",
        "coverage",
        "        if all(whole.covers(end - 1) for _, end in kept):\n",
        "        if True:\n",
        "the encoding drops a message whose outputs are visible, and the next owner publishes them again",
        _COVERAGE + "test_a_commit_covers_what_earlier_commits_have_covered",
        _COVERAGE + "TestTransactions::runTest",
    ),
    _mutant(
        "sent_again_after_an_unknown_commit",
        "performer",
        "            arrived = [output for output in request.outputs if coverage.covers(output.position)]\n",
        "            arrived: list[Output] = []\n",
        "outputs that are visible are sent again",
        _PERFORMER + "the_stored_position_tells_an_unknown_outcome[error0-True]",
        _PERFORMER + "the_stored_position_tells_an_unknown_outcome[error1-True]",
    ),
    _mutant(
        "the_generation_of_the_moment",
        "performer",
        "send_offsets_to_transaction(offsets, snapshot.metadata, CALL)",
        "send_offsets_to_transaction(offsets, self.snapshot().metadata, CALL)",
        "a member commits a lost partition under a later generation",
        _PERFORMER + "a_transaction_names_the_generation_of_its_beginning",
    ),
    _mutant(
        "commits_a_lost_partition",
        "performer",
        "            if len(owned) < len(requests):\n",
        "            if False:\n",
        "outputs of a lost partition become visible",
        _PERFORMER + "a_lost_partition_aborts_and_the_others_are_sent_again",
    ),
)
