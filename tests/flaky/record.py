"""What was run and what became of it, and what to run next: no clock, no process, no file but by `read` and `write`."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

__all__ = ["FULL_RUNS", "REPEATS", "Counted", "Record", "Slice", "group_of"]

REPEATS: Final = 30
FULL_RUNS: Final = 3

FIRST: Final = ("tests/runtime", "tests/kafka", "tests/jetstream", "tests/demo", "tests/contract", "tests/cohort")
"""Where most depends on time: these groups come first in each round."""

MOST_AT_ONCE: Final = 10
"""Runs of one test in a slice: the next slice has another seed and another order."""


@dataclass
class Counted:
    """One test, as it was ``made`` of. ``seconds``: what all of its runs took; ``first``: the file with the text of its
    first failure."""

    rule: str
    made: str = ""
    runs: int = 0
    failures: int = 0
    skipped: int = 0
    seconds: float = 0.0
    first: str = ""


@dataclass(frozen=True)
class Slice:
    """What one start of pytest runs: each test so often. None of ``wanted``: the whole of `make test`, once."""

    name: str
    wanted: Mapping[str, int] | None

    @property
    def runs(self) -> int:
        """How often it runs any test; 0 when it runs all."""
        return sum((self.wanted or {}).values())


@dataclass
class Record:
    """Of one product. ``full``: seconds of each full run that came to its end, and a digest of the tests it ran;
    ``mended``: what failed of tests that are made otherwise by now; ``slices``: what was printed of each."""

    product: str
    tests: dict[str, Counted] = field(default_factory=dict)
    full: list[tuple[float, str]] = field(default_factory=list)
    mended: dict[str, str] = field(default_factory=dict)
    slices: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """None where nothing was written yet."""
        if not path.is_file():
            return None
        kept: dict[str, Any] = json.loads(path.read_text())
        try:
            tests = {name: Counted(**one) for name, one in kept["tests"].items()}
            full = [(seconds, made) for seconds, made in kept["full"]]
            return cls(**{**kept, "tests": tests, "full": full})
        except TypeError:
            # Of an earlier version of this program.
            return cls(f"of another form, {kept.get('product') or kept.get('commit')}")

    def write(self, path: Path) -> None:
        """All of it or nothing."""
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        beside.replace(path)

    def choose(self, chosen: Mapping[str, tuple[str, str]]) -> int:
        """Know these tests, by their ids, the names of their rules, and what they are made of.

        What is known of them already is kept, but not of one that is made otherwise by now: that begins anew, and what
        had failed of it is in ``mended``. Nothing is missing of a test that is not among them any more, as it is when
        the tree was edited. Returns how many began anew.
        """
        for name, one in self.tests.items():
            one.rule = chosen[name][0] if name in chosen else ""
        anew = {name for name, (_, made) in chosen.items() if name in self.tests and self.tests[name].made != made}
        for name in anew:
            one = self.tests[name]
            if one.failures:
                before = f"{self.mended[name]}; " if name in self.mended else ""
                self.mended[name] = f"{before}{one.failures} of {one.runs}: {one.first}"
        for name, (rule, made) in chosen.items():
            if name in anew or name not in self.tests:
                self.tests[name] = Counted(rule, made)
        return len(anew)

    def add(self, lines: Iterable[Mapping[str, Any]]) -> tuple[int, dict[str, str]]:
        """Count what the plugin wrote; returns how many runs ended, and the first failure's text of each test in them.

        A run whose end was not written was stopped, and counts for nothing, unless it had failed by then.
        """
        ended, failed, skipped = set(), set(), set()
        texts: dict[str, str] = {}
        for line in lines:
            name, run = line["test"], (line["test"], line["run"])
            self.tests.setdefault(name, Counted("")).seconds += line["seconds"]
            if line["outcome"] == "failed":
                failed.add(run)
                texts.setdefault(name, line["text"])
            elif line["outcome"] == "skipped":
                skipped.add(run)
            if line["phase"] == "teardown":
                ended.add(run)
        for name, _ in ended | failed:
            self.tests[name].runs += 1
        for name, _ in failed:
            self.tests[name].failures += 1
        for name, _ in (skipped & ended) - failed:
            self.tests[name].skipped += 1
        return len(ended | failed), texts

    def missing(self, only: Collection[str] = (), *, repeats: int = REPEATS) -> dict[str, int]:
        """How many runs each test lacks, of those below the paths of ``only``, or of all; none that lacks none."""
        return {
            name: repeats - one.runs
            for name, one in self.tests.items()
            if one.rule and one.runs < repeats and (not only or name.startswith(tuple(only)))
        }

    def next_slice(
        self, only: Collection[str] = (), *, repeats: int = REPEATS, seconds: float, processes: int
    ) -> Slice | None:
        """The group that is furthest behind, as often as takes ``processes`` about ``seconds``; None when no run is
        missing.

        Once for a test that was not run before: nobody knows how long it takes.
        """
        missing = self.missing(only, repeats=repeats)
        if not missing:
            return None
        behind = Counter[str]()
        for name, runs in missing.items():
            behind[group_of(name)] = max(behind[group_of(name)], runs)
        group = min(behind, key=lambda one: (-behind[one], _rank(one), one))
        tests = {name: runs for name, runs in missing.items() if group_of(name) == group}
        known = [one for one in map(self.tests.__getitem__, tests) if one.runs]
        times = 1
        if len(known) == len(tests):
            once = sum(one.seconds / one.runs for one in known) / processes
            times = min(MOST_AT_ONCE, max(1, int(seconds / max(once, 0.001))))
        # Those that are ahead wait for the others.
        least = behind[group] - times
        return Slice(group, {name: runs - max(0, least) for name, runs in tests.items() if runs > least})

    def full_missing(self, runs: int = FULL_RUNS) -> int:
        """How many full runs are still to come."""
        return max(0, runs - len(self.full))

    def failed(self) -> dict[str, Counted]:
        """The tests that failed, the most frequent first."""
        found = [(name, one) for name, one in self.tests.items() if one.failures]
        return dict(sorted(found, key=lambda entry: (-entry[1].failures / entry[1].runs, entry[0])))


def group_of(name: str) -> str:
    """The folder of a test, by its id."""
    return str(PurePosixPath(name.partition("::")[0]).parent)


def _rank(group: str) -> int:
    return FIRST.index(group) if group in FIRST else len(FIRST)
