"""The mutation score: ``python -m tests.mutants.score [NAMES…] [--every N] [--seed S] [--fresh]``; see ``--help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.mutants.score.equivalents import EQUIVALENTS
from tests.mutants.score.mutations import Mutation, mutations_of, sampled
from tests.mutants.score.runner import Runner, run
from tests.mutants.score.targets import ROOT, Target, chosen
from tests.mutants.score.totals import FileScore, table, wrong_equivalents
from tests.mutants.score.verdicts import Verdict, Verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the score of each file. Returns 0 if each target reaches its goal and no equivalent is wrong."""
    parser = argparse.ArgumentParser("make mutants", description="Print the mutation score of each file.")
    parser.add_argument("names", nargs="*", help="targets, files or folders (default: all)")
    parser.add_argument("--every", type=int, default=1, help="run a sample of one mutation in N")
    parser.add_argument("--seed", type=int, default=0, help="which of the N samples, 0 or more")
    parser.add_argument("--limit", type=float, default=30.0, help="CPU seconds before a mutation counts as a survivor")
    parser.add_argument("--fresh", action="store_true", help="run mutations again whose verdict is stored")
    options = parser.parse_args(arguments)
    try:
        targets = chosen(options.names)
    except ValueError as error:
        parser.error(str(error))
    verdicts = Verdicts(fresh=options.fresh)
    good = True
    for target, files in targets.items():
        good = _score(target, files, verdicts, options) and good
    return 0 if good else 1


def _score(target: Target, files: Sequence[str], verdicts: Verdicts, options: argparse.Namespace) -> bool:
    mutations = [mutation for file in files for mutation in mutations_of(ROOT / file, file)]
    scores = {file: FileScore(file) for file in files}

    def judged(mutation: Mutation, verdict: Verdict) -> None:
        score = scores[mutation.file]
        score.add(mutation, verdict)
        if mutation in score.survived[-1:]:
            print(f"  survived  {mutation.file}:{mutation.first}  {mutation.name}", flush=True)

    status = run(
        target.tests,
        Runner(
            target.paths(),
            sampled(mutations, options.every, options.seed),
            verdicts,
            judged,
            options.limit,
            on_postgres=target.on_postgres,
        ),
    )
    wrong = wrong_equivalents(
        EQUIVALENTS, mutations, [each for score in scores.values() for each in score.killed], files
    )
    print(table(target, list(scores.values()), options.every))
    for line in wrong:
        print(line)
    percent = FileScore.total(list(scores.values()))
    return status == 0 and not wrong and percent >= target.goal


if __name__ == "__main__":
    sys.exit(main())
