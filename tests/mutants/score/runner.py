"""Runs the tests of a target against each mutation: a plug-in of pytest that forks a child for each mutation.

The tests are collected once. A first run of each test file in a child says what each test covers. A mutation then
runs the tests that execute its lines, those first that killed other mutations of the file in little time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Final

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from tests.conftest import is_fast
from tests.mutants.score.forks import Report, forked, limit_cpu
from tests.mutants.score.mutations import Mutation
from tests.mutants.score.planting import Plot
from tests.mutants.score.probes import Probes
from tests.mutants.score.servers import SharedPostgres
from tests.mutants.score.targets import ROOT
from tests.mutants.score.verdicts import Covered, Verdict, Verdicts, digest

_SAVE_EVERY: Final = 25
"""Mutations between two writes of the verdicts."""

_WAITS: Final = 3.0
"""Ratio of the time after which a mutation counts as a survivor to the CPU time of ``Runner``."""

_OWN_LIMIT: Final = 5.0
"""Seconds of CPU time that each test may use beyond twenty times its usual time, before it counts as hung."""

Judged = Callable[[Mutation, Verdict], None]
"""Is told each verdict."""


class Runner:
    """Finds the verdict of each mutation.

    Args:
        files: All files of the target, whose covered lines are recorded.
        mutations: The mutations to run.
        verdicts: The stored verdicts.
        judged: Is told each verdict.
        limit: CPU time in seconds after which a mutation counts as a survivor. For tests that wait, three times this
            time counts too.
        on_postgres: Whether tests on the shared PostgreSQL server run too.
    """

    def __init__(
        self,
        files: Sequence[str],
        mutations: Sequence[Mutation],
        verdicts: Verdicts,
        judged: Judged,
        limit: float,
        *,
        on_postgres: bool = False,
    ) -> None:
        self._files = files
        self._mutations = mutations
        self._verdicts = verdicts
        self._judged = judged
        self._limit = limit
        self._server = SharedPostgres() if on_postgres else None
        self._sources = digest(*((ROOT / file).read_bytes() for file in files))
        self._items: dict[str, pytest.Item] = {}
        self._covered: dict[str, Covered] = {}
        self._kills: dict[str, Counter[str]] = {}
        self._confirmed: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        # Runs that repeat, and a failure that is neither shrunk nor stored. Settings are made at the import of a test.
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutants", derandomize=True, database=None, phases=phases, deadline=None)
        settings.load_profile("mutants")
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        on = () if self._server is None else ("postgres",)
        items[:] = [item for item in items if is_fast(item, on=on)]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        self._items = {item.nodeid: item for item in session.items}
        for file in self._files:
            importlib.import_module(_module(file))
        plot = Plot(self._files)
        with contextlib.nullcontext() if self._server is None else self._server.shared():
            self._measure(plot)
            try:
                for number, mutation in enumerate(self._mutations):
                    self._judged(mutation, self._verdict(mutation, plot))
                    if number % _SAVE_EVERY == 0:
                        self._verdicts.save()
            finally:
                self._verdicts.save()
        return True

    def _measure(self, plot: Plot) -> None:
        by_file: dict[str, list[pytest.Item]] = {}
        for nodeid, item in self._items.items():
            by_file.setdefault(nodeid.split("::")[0], []).append(item)
        for test_file, items in by_file.items():
            covered = self._verdicts.covered(test_file, self._sources)
            if covered is None:
                covered, whole = self._cover(test_file, items, plot)
                if whole:
                    self._verdicts.cover(test_file, self._sources, covered)
                    self._verdicts.save()
            self._covered |= {nodeid: each for nodeid, each in covered.items() if nodeid in self._items}

    def _cover(self, test_file: str, items: Sequence[pytest.Item], plot: Plot) -> tuple[dict[str, Covered], bool]:
        """Run the tests of a file in a child. Return what those cover that passed, and whether the child ended well."""
        ended = forked(lambda report: self._run_covered(items, plot, report))
        covered, modules = {}, []
        for line in ended.lines:
            kind, _, text = line.partition(" ")
            if kind == "covered":
                nodeid, *about = json.loads(text)
                covered[nodeid] = Covered(*about)
            elif kind == "modules":
                modules = json.loads(text)
            else:
                print(f"  left out, because it fails in a child: {line}")
        if ended.signal:
            print(
                f"  {test_file}: signal {ended.signal} ended the child; the tests after {[*covered][-1:]} are left out"
            )
        # Further children then need not import them.
        for name in modules:
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        return covered, not ended.signal

    def _run_covered(self, items: Sequence[pytest.Item], plot: Plot, report: Report) -> None:
        probes = Probes()
        for file in self._files:
            path = ROOT / file
            plot.replace(probes.code(file, str(path), path.read_text()))
        for item, following in zip(items, [*items[1:], None], strict=True):
            probes.hits.clear()
            before, began = time.process_time(), time.monotonic()
            if _passes(item, following):
                seconds, waited = time.process_time() - before, time.monotonic() - began
                report("covered " + json.dumps((item.nodeid, seconds, probes.lines(), waited)))
            else:
                report(f"failed {item.nodeid}")
        report("modules " + json.dumps([name for name in sys.modules if not name.startswith("__")]))

    def _verdict(self, mutation: Mutation, plot: Plot) -> Verdict:
        known = self._verdicts.get(mutation)
        if known is not None and known.killed_by:
            self._kills.setdefault(mutation.file, Counter())[known.killed_by] += 1
            return known
        passed = set(known.digests) if known is not None else set[str]()
        while True:
            tests = [test for test in self._ordered(mutation) if self._digest(test) not in passed]
            verdict = self._run(mutation, tests, plot) if tests else Verdict()
            if not verdict.killed_by or self._is_confirmed(verdict.killed_by):
                break
        if verdict.killed_by:
            verdict.digests = [self._digest(verdict.killed_by)]
            self._kills.setdefault(mutation.file, Counter())[verdict.killed_by] += 1
        else:
            verdict.digests = sorted(passed | {self._digest(test) for test in self._covered})
        self._verdicts.put(mutation, verdict)
        return verdict

    def _digest(self, test: str) -> str:
        return self._verdicts.digest(test.split("::")[0])

    def _ordered(self, mutation: Mutation) -> list[str]:
        """The tests that execute the changed lines, the best first."""
        kills = self._kills.get(mutation.file, Counter())
        changed = range(mutation.first, mutation.last + 1)
        tests = [
            test
            for test, covered in self._covered.items()
            if any(n in changed for n in covered.lines.get(mutation.file, ()))
        ]

        def worth(test: str) -> float:
            covered = self._covered[test]
            return (kills[test] + 0.2) / (max(covered.seconds, covered.waited) + 0.02)

        return sorted(tests, key=worth, reverse=True)

    def _run(self, mutation: Mutation, tests: Sequence[str], plot: Plot) -> Verdict:
        ended = forked(lambda report: self._run_mutated(mutation, tests, plot, report))
        last = ended.lines[-1] if ended.lines else ""
        if last.startswith("error"):
            raise RuntimeError(f"{mutation.file}: {mutation.name}: {last}")
        if last in ("survived", "impossible"):
            return Verdict(how="" if last == "survived" else last)
        running = next((line for line in reversed(ended.lines) if line.isdigit()), None)
        if running is None:
            raise RuntimeError(f"{mutation.file}: {mutation.name}: the child ended with {ended}")
        how = "test" if last == "killed" else "hang" if ended.hung else "crash"
        return Verdict(tests[int(running)], how)

    def _run_mutated(self, mutation: Mutation, tests: Sequence[str], plot: Plot, report: Report) -> None:
        try:
            plot.plant(mutation)
        except (LookupError, SyntaxError):
            report("impossible")
            return
        begun, began = time.process_time(), time.monotonic()
        for number, (test, following) in enumerate(zip(tests, [*tests[1:], None], strict=True)):
            if time.process_time() - begun > self._limit or time.monotonic() - began > _WAITS * self._limit:
                break
            report(str(number))
            limit_cpu(_OWN_LIMIT + 20 * self._covered[test].seconds)
            if not _passes(self._items[test], self._items[following] if following is not None else None):
                report("killed")
                return
        report("survived")

    def _is_confirmed(self, test: str) -> bool:
        """Whether a test passes alone and without a mutation. A test that does not is left out from now on."""
        if test in self._confirmed:
            return True

        def work(report: Report) -> None:
            report("passed" if _passes(self._items[test], None) else "failed")

        if forked(work).lines == ["passed"]:
            self._confirmed.add(test)
            return True
        print(f"  left out, because it fails alone: {test}")
        del self._covered[test]
        return False


def run(tests: Iterable[str], runner: Runner) -> int:
    """Run a runner in pytest, and return the exit status of pytest. Blocks for seconds to hours."""
    arguments = [
        "-m",
        "not slow and not campaign",
        "-p",
        "no:randomly",
        "-p",
        "no:xdist",
        "--timeout=0",
        "-s",
        "-q",
        "--no-header",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    os.chdir(ROOT)
    return int(pytest.main([*arguments, "--tb=native", *tests], plugins=[runner]))


def _passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=following))


def _module(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "adapters" else parts)
