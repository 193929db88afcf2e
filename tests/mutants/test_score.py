"""The mutation score counts mutants of every function, plants each in memory, and keeps valid verdicts."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from tests import conftest
from tests.components import PostgresServer
from tests.mutants.score import forks
from tests.mutants.score.equivalents import EQUIVALENTS, Equivalent
from tests.mutants.score.forks import Report, forked, limit_cpu
from tests.mutants.score.mutations import Mutation, mutations_of, sampled
from tests.mutants.score.planting import Plot
from tests.mutants.score.probes import Probes
from tests.mutants.score.servers import SharedPostgres
from tests.mutants.score.targets import ROOT, TARGETS, chosen
from tests.mutants.score.totals import FileScore, table, wrong_equivalents
from tests.mutants.score.verdicts import Verdict, Verdicts

SOURCE = '''"""A module."""
from dataclasses import dataclass
from functools import cache


@dataclass(slots=True)
class Door:
    """A door."""

    width: int = 1

    @property
    def wide(self) -> bool:
        """Whether it is wide."""
        return self.width > 2

    def open(self, by: int = 3) -> str:
        if by:
            self.note(by)
        else:
            raise ValueError("a text for people")
        return "open"

    def note(self, by: int) -> None: ...


@cache
def double(number: int) -> int:
    return number * 2


def adder(by: int):
    def add(number: int) -> int:
        return number + by

    return add
'''


@pytest.fixture
def door(tmp_path: Path) -> ModuleType:
    path = tmp_path / "door.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("door", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mutations(door: ModuleType) -> dict[str, Mutation]:
    assert door.__file__ is not None
    return {each.name: each for each in mutations_of(Path(door.__file__), door.__file__)}


def test_functions_are_mutated_except_defaults_and_texts_with_a_space(door: ModuleType) -> None:
    assert [*mutations(door)] == [
        "Door.wide: return self.width > 2 → return self.width >= 2",
        "Door.wide: return self.width > 2 → return self.width > 3",
        "Door.open: if by: → if not (by):",
        "Door.open: self.note(by) → pass",
        "Door.open: self.note(by) → self.note(None)",
        'Door.open: raise ValueError("a text for people") → raise ValueError(None)',
        'Door.open: return "open" → return "XXopenXX"',
        'Door.open: return "open" → return "OPEN"',
        "double: return number * 2 → return number / 2",
        "double: return number * 2 → return number * 3",
        "adder: return number + by → return number - by",
    ]


def test_equal_changes_of_a_function_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "twice.py"
    path.write_text("def f(x):\n    x.pop()\n    x.pop()\n")
    found = mutations_of(path, "twice.py")
    assert [(each.first, each.change) for each in found] == [(2, "x.pop() → pass"), (3, "x.pop() → pass #2")]


def test_the_constant_false_becomes_true_and_never_none(tmp_path: Path) -> None:
    path = tmp_path / "flag.py"
    path.write_text("def f():\n    x = False\n    return x\n")
    assert [each.change for each in mutations_of(path, "flag.py")] == ["x = False → x = True"]


def test_a_mutation_is_planted_in_objects_that_live(door: ModuleType) -> None:
    wide, doubled = door.Door(3), door.double(4)
    plot = Plot([door.__file__ or ""])
    plot.plant(mutations(door)["Door.wide: return self.width > 2 → return self.width > 3"])
    plot.plant(mutations(door)["double: return number * 2 → return number * 3"])
    assert (wide.wide, doubled, door.double(4)) == (False, 8, 12)


def test_functions_of_a_function_are_planted_too(door: ModuleType) -> None:
    add = door.adder(3)
    Plot([door.__file__ or ""]).plant(mutations(door)["adder: return number + by → return number - by"])
    assert (add(5), door.adder(3)(5)) == (2, 2)


def test_a_function_that_is_not_in_memory_cannot_be_mutated(door: ModuleType) -> None:
    mutation = mutations(door)["Door.open: self.note(by) → pass"]
    with pytest.raises(LookupError, match=r"Door\.open: self\.note\(by\) → pass: the function has no place for it"):
        Plot([]).plant(mutation)


def test_probes_show_the_executed_lines(door: ModuleType) -> None:
    file = door.__file__ or ""
    probes = Probes()
    Plot([file]).replace(probes.code("door", file, SOURCE))
    assert door.Door(3).open() == "open"
    executed = {SOURCE.splitlines()[line - 1].strip() for line in probes.lines()["door"]}
    assert executed == {"if by:", "self.note(by)", 'return "open"', "def note(self, by: int) -> None: ..."}


@pytest.mark.process
def test_a_child_reports_its_lines_and_its_signal() -> None:
    def count(report: Report) -> None:
        report("one")
        report("two")

    def compute(report: Report) -> None:
        limit_cpu(0.05)
        while True:
            pass

    def fail(report: Report) -> None:
        raise ValueError("no")

    assert forked(count) == forks.Ended(["one", "two"], 0, hung=False)
    assert forked(compute).signal == signal.SIGPROF
    assert "ValueError: no" in forked(fail).lines[0]


@pytest.mark.process
def test_a_child_that_waits_without_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_IDLE", 0.2)
    assert forked(lambda _: time.sleep(10_000)) == forks.Ended([], signal.SIGKILL, hung=True)


@pytest.mark.process
def test_a_child_that_computes_without_a_report_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other threads may use a little CPU time for ever."""
    monkeypatch.setattr(forks, "_SILENT", 0.2)

    def compute(report: Report) -> None:
        report("one")
        while True:
            pass

    assert forked(compute) == forks.Ended(["one"], signal.SIGKILL, hung=True)


@pytest.mark.process
def test_a_child_ends_without_the_parents_exit_handlers(tmp_path: Path) -> None:
    import atexit

    touch = partial((tmp_path / f"from {os.getpid()}").touch)
    atexit.register(touch)
    try:
        forked(lambda report: report("done"))
    finally:
        atexit.unregister(touch)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.process
def test_a_child_neither_starts_nor_stops_the_shared_server(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(PostgresServer, "start", lambda _: calls.append("start"))
    monkeypatch.setattr(PostgresServer, "stop", lambda _: calls.append("stop"))
    server = SharedPostgres()

    def use(report: Report) -> None:
        assert vars(conftest)["PostgresServer"]() is server
        server.start()
        server.stop()
        report(" ".join(calls))

    with server.shared():
        assert forked(use).lines == ["start"]
    assert calls == ["start", "stop"]
    assert vars(conftest)["PostgresServer"] is PostgresServer


def test_a_verdict_holds_while_its_function_and_its_test_are_unchanged(door: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "core"
    folder.mkdir(parents=True)
    test = folder / "test_door.py"
    test.write_text("first")
    killed, survived, *_ = mutations(door).values()

    def stored() -> Verdicts:
        return Verdicts(tmp_path / "mutants.json", tmp_path)

    verdicts = stored()
    digest = verdicts.digest("tests/core/test_door.py")
    verdicts.put(killed, Verdict("tests/core/test_door.py::test_wide", "test", [digest]))
    verdicts.put(survived, Verdict(digests=[digest]))
    verdicts.save()
    assert stored().get(killed) == Verdict("tests/core/test_door.py::test_wide", "test", [digest])
    assert stored().get(survived) == Verdict(digests=[digest])
    test.write_text("second")
    assert stored().get(killed) is None
    assert stored().digest("tests/core/test_door.py") != digest
    test.write_text("first")
    (folder / "helper.py").write_text("changed")
    assert stored().get(killed) is None
    assert Verdicts(tmp_path / "mutants.json", tmp_path, fresh=True).get(survived) is None


def test_the_samples_of_all_seeds_have_each_mutation_once(door: ModuleType) -> None:
    found = [*mutations(door).values()]
    samples = [sampled(found, 3, seed) for seed in range(3)]
    assert sorted(each.name for sample in samples for each in sample) == sorted(each.name for each in found)
    assert sampled(found, 3, 4) == samples[1]


def test_the_table_counts_killed_mutations_without_equivalents(door: ModuleType) -> None:
    first, second, third, fourth, *_ = mutations(door).values()
    score = FileScore("door.py")
    score.add(first, Verdict("test", "test"))
    score.add(second, Verdict("test", "hang"))
    score.add(third, Verdict())
    score.add(fourth, Verdict(how="impossible"))
    score.equivalent.append(fourth)
    assert (len(score.killed), score.hung, score.survived) == (2, 1, [third])
    rows = table(TARGETS[0], [score], 4).splitlines()
    assert rows[1].split() == ["door.py", "4", "2", "1", "1", "1", "66.7%"]
    assert rows[2].split() == ["core", "(goal", "95%)", "4", "2", "1", "1", "1", "66.7%"]
    assert rows[3] == "a sample: one mutation in 4"


def test_an_equivalent_that_is_gone_or_killed_is_wrong(door: ModuleType) -> None:
    first, second, *_ = mutations(door).values()
    named = [Equivalent(each.file, each.function, each.change, "none") for each in (first, second)]
    gone = Equivalent(first.file, "Door.close", "pass → return", "none")
    lines = wrong_equivalents([*named, gone], [first, second], [first], [first.file])
    assert [line.rpartition(": ")[2] for line in lines] == ["a test kills it; remove it", "no such mutation; remove it"]
    assert wrong_equivalents([gone], [], [], ["other.py"]) == []


@pytest.mark.long
@pytest.mark.parametrize("file", sorted({each.file for each in EQUIVALENTS}))
def test_every_named_equivalent_is_a_mutation(file: str) -> None:
    functions = {each.function for each in EQUIVALENTS if each.file == file}
    assert wrong_equivalents(EQUIVALENTS, mutations_of(ROOT / file, file, functions), [], [file]) == []


def test_names_select_targets_files_and_folders() -> None:
    assert [target.name for target in chosen([])] == [target.name for target in TARGETS]
    assert {target.name: files for target, files in chosen(["lanes/core/ring.py"]).items()} == {
        "core": ["lanes/core/ring.py"]
    }
    assert "lanes/core/cohort/plan.py" in chosen(["lanes/core/cohort"])[TARGETS[0]]
    with pytest.raises(ValueError, match=r"lanes/nowhere: selects no mutated file; .* core, cohort, lanes_kafka"):
        chosen(["lanes/nowhere"])


def test_every_file_and_folder_of_a_target_exists() -> None:
    for each in TARGETS:
        assert all([*ROOT.glob(pattern)] for pattern in each.files)
        assert all((ROOT / place).exists() for place in each.tests)
