"""The table of the last soaks in ``docs/checkers.md``: ``python -m tests.soak.published`` writes it.

Every checker judges every schedule, so the schedules, the faults and the pairs of a backend count for each of its
promises. A planted fault counts for a promise if a check of the promise has to find the fault.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.mutants import Mutant
from tests.mutants.table import MUTANTS
from tests.soak.record import LAST, ROOT, collected

PAGE: Final = ROOT / "docs" / "checkers.md"
BEGIN: Final = "<!-- the last soak: python -m tests.soak.published -->\n"
END: Final = "<!-- end of the last soak -->\n"

PROMISES: Final = {
    "[P1](promises.md#p1)": [
        "AttemptsContinue",
        "BlockedStays",
        "DeliveredThenStarted",
        "DrainBeforeFeed",
        "DrainStartsNothing",
        "EpochsRise",
        "ExclusiveOwner",
        "ExclusiveSlot",
        "NewestOwner",
        "NewestToken",
        "NoOverlap",
        "KeptBeforeRetry",
        "LeaseCovers",
        "LeaseHolds",
        "LockHolds",
        "LossEndsLease",
        "MapNamesOwners",
        "NothingStartsInDoubt",
        "OutputOrder",
        "OrderAcrossAssignments",
        "OwnedSlotsOnly",
        "OwnerOfItsSlot",
        "OwnersStore",
        "PerKeyOrder",
        "RedeliveryNotRun",
        "RetryHoldsLane",
        "RunsOnce",
        "StartsAlone",
        "UnownedNeverFed",
        "ZombiesDoNotCount",
    ],
    "[P2](promises.md#p2)": [
        "AtLeastOnce",
        "AttemptsCount",
        "CaughtUp",
        "CommitsAreChecked",
        "CommitsRise",
        "ConfirmedIsStored",
        "DeadLetterBeforeSettle",
        "LetterIsStored",
        "NoCommitAfterLoss",
        "NoCommitAfterRevoke",
        "NoCommitPastUnfinished",
        "NoSettleBeforeEnd",
        "NothingLost",
        "NothingStranded",
        "OneCommitAtATime",
        "OneTerminalOutcome",
        "OutputsAtLeastOnce",
        "OwnersCommit",
        "PositionsRise",
        "StartsOnce",
        "UnknownCommitRepeated",
    ],
    "[P3](promises.md#p3)": [
        "BoundedBytes",
        "BoundedInFlight",
        "PartitionBudgets",
        "PauseAtBounds",
        "PauseTakesNothing",
    ],
    "[P4](promises.md#p4)": [
        "BoundedRepeats",
        "CommitsInTime",
        "CompletedIsKept",
        "DrainInTime",
        "DrainWaitsForRunning",
        "GivenUpOutputs",
        "HandedOver",
        "HandedOverAfterDrain",
        "KeptAlive",
        "MaxAhead",
        "NoDuplicateCleanly",
        "RepeatsNothing",
        "SettledStaysSettled",
        "StopEnds",
    ],
    "[P5](promises.md#p5)": [
        "Deadlock",
        "DeletionIsNear",
        "DeletionTold",
        "FrozenEnds",
        "GapIsReal",
        "KeptWorkGoesOn",
        "LaneProgress",
        "LossHasReason",
        "Livelock",
        "LossInTime",
        "MaxAhead",
        "MissedIsReal",
        "OnlyLostIsLost",
        "OnlyMovedSlotsWait",
        "PartitionTurns",
        "PlacesGivenBack",
        "RecreatedStops",
        "RefusedStops",
        "RevokesEnd",
        "SilenceIsReal",
        "SilenceTold",
        "StallNamed",
    ],
}
"""The checks of each promise that a campaign can break."""

OTHERS: Final = "parts alone"
"""Row of the faults that a machine of the engine, of a lease or of a retry loop has to find."""


class Backend(NamedTuple):
    """A backend of the table.

    Attributes:
        name: Name in the table.
        campaigns: The campaigns of the planted faults.
        schedules: Key of its simulated schedules in the result of the simulation.
        pairs: Key of its pairs in the result of the simulation; "" = the simulation counts no pairs.
        faults: The soak with real faults, and the key of their number; None = no broker.
    """

    name: str
    campaigns: tuple[str, ...]
    schedules: str
    pairs: str = ""
    faults: tuple[str, str] | None = None


BACKENDS: Final = (
    Backend(
        "in memory",
        (
            *("jetstream", "kafka", "engine", "modes", "budgets", "kept_attempts", "retry_loops"),
            *("publishing", "publishing_batches"),
        ),
        "schedules",
    ),
    Backend("Kafka", ("kafka_adapter", "kafka_widths"), "kafka_schedules", "kafka_pairs", ("kafka", "faults")),
    Backend(
        "JetStream", ("jetstream_adapter",), "jetstream_schedules", "jetstream_pairs", ("simulation", "real_faults")
    ),
    Backend(
        "PostgreSQL",
        ("postgres_adapter", "ranges_adapter"),
        "postgres_schedules",
        "postgres_pairs",
        ("postgres", "faults"),
    ),
    Backend(
        "cohort",
        ("cohort", "cohort_targets", "cohort_forced", "lease_walks", "jetstream_widths"),
        "cohort_schedules",
        "",
        ("jetstream", "faults"),
    ),
)


def rows(results: dict[str, dict[str, Any]], mutants: Iterable[Mutant] = MUTANTS.values()) -> list[str]:
    """Return the lines of the table for these results of the soaks."""
    simulation, planted = results["simulation"], list(mutants)
    found = set(simulation["planted_names"])
    lines = [
        "| promise | backend | simulated schedules | real faults | planted faults found | pairs reached |",
        "|---|---|---|---|---|---|",
    ]
    known = {check for checks in PROMISES.values() for check in checks}
    # The checks of state machines, retry loops and walks of a lease have names of their own.
    others = {check for mutant in planted if not {*mutant.found_by} & known for check in mutant.found_by}
    for promise, checks in [*PROMISES.items(), (OTHERS, others)]:
        for backend in BACKENDS:
            mine = [m.name for m in planted if m.campaign in backend.campaigns and {*m.found_by} & {*checks}]
            faults = "–" if backend.faults is None else f"{results[backend.faults[0]][backend.faults[1]]:,}"
            pairs = "{} of {}".format(*simulation[backend.pairs]) if backend.pairs else "–"
            hits = f"{len(found & {*mine})} of {len(mine)}" if mine else "–"
            schedules = simulation[backend.schedules]
            lines.append(f"| {promise} | {backend.name} | {schedules:,} | {faults} | {hits} | {pairs} |")
    return lines


def written(page: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the page with the table of these results."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(rows(results)) + "\n\n" + END + after


def main(page: Path = PAGE, last: Path = LAST) -> int:
    """Write the results and the page."""
    results = collected(last=last)
    last.write_text(json.dumps(results, indent=1) + "\n")
    page.write_text(written(page.read_text(), results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
