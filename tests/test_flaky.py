"""`make flaky`: which tests it chooses, what it counts, and what it runs next."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.components import wait_until
from tests.conftest import is_gone
from tests.flaky import __main__ as program
from tests.flaky.choosing import (
    LONGEST,
    PRODUCT,
    READ,
    ROOT,
    RULES,
    Seen,
    everything,
    imports_of,
    made_of,
    product,
    rule_of,
)
from tests.flaky.load import load
from tests.flaky.plugin import split
from tests.flaky.record import MOST_AT_ONCE, REPEATS, Counted, Record, Slice, group_of

pytest_plugins = ["pytester"]

HERE = "tests/runtime/test_a.py::test_a"
THERE = "tests/kafka/test_b.py::test_b[1]"
ELSEWHERE = "tests/history/test_c.py::test_c"


def seen(*imports: str, fixtures: tuple[str, ...] = (), coroutine: bool = False, allowed: float = 0.0) -> Seen:
    return Seen(frozenset(fixtures), frozenset(imports), coroutine, allowed)


def line(test: str, phase: str = "teardown", outcome: str = "passed", *, run: int = 0, seconds: float = 0.5) -> Any:
    said = {"text": f"{test} {run} {phase} broke"} if outcome == "failed" else {}
    return {"test": test, "run": run, "phase": phase, "outcome": outcome, "seconds": seconds, **said}


@pytest.mark.parametrize(
    ("test", "rule"),
    [
        (seen("json", "tests.core.builders"), None),
        (seen(fixtures=("kafka", "tmp_path")), "broker"),
        (seen("tests.components.NatsServer", coroutine=True), "broker"),
        (seen("confluent_kafka.Consumer"), "broker"),
        (seen("confluent_kafkaesque"), None),
        (seen("subprocess", "threading"), "process"),
        (seen(fixtures=("spawn",)), "process"),
        (seen("threading"), "thread"),
        (seen(coroutine=True), "timer"),
        (seen("tests.components.wait_until"), "timer"),
        (seen("threading", allowed=LONGEST), "thread"),
        (seen("threading", allowed=LONGEST + 1), None),
    ],
)
def test_a_test_is_chosen_by_the_first_rule_that_holds(test: Seen, rule: str | None) -> None:
    found = rule_of(test)
    assert (found and found.name) == rule


def test_imports_are_those_of_the_helpers_too_but_not_of_the_starter(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "components").mkdir(parents=True)
    (tests / "test_a.py").write_text("from tests import helper\nfrom tests.components import wait_until\n")
    (tests / "helper.py").write_text("def f():\n    from tests.other import g\n")
    (tests / "other.py").write_text("import threading, tests.helper\n")
    (tests / "conftest.py").write_text("import subprocess\n")
    (tests / "components" / "starter.py").write_text("import socket\n")
    with (tests / "other.py").open("a") as file:
        file.write("from tests.conftest import x\nimport tests.components.starter\n")
    found = imports_of(tests / "test_a.py", tmp_path).names
    assert {"tests.components.wait_until", "threading"} <= found
    assert not {"subprocess", "socket"} & found


def test_the_rules_name_what_there_is() -> None:
    """A fixture or helper with another name would leave its tests out, and nobody would see it."""
    fixtures = (ROOT / "tests" / "conftest.py").read_text() + (ROOT / "tests" / "spark" / "conftest.py").read_text()
    for rule in RULES:
        assert [name for name in rule.fixtures if f"def {name}(" not in fixtures] == []
    assert rule_of(seen(*imports_of(ROOT / "tests" / "kafka" / "test_losses.py").names)) == RULES[0]
    assert rule_of(seen(*imports_of(ROOT / "tests" / "runtime" / "test_threads.py").names)) == RULES[2]
    assert rule_of(seen(*imports_of(ROOT / "tests" / "core" / "test_engine.py").names)) is None


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("a.py::t", ("a.py::t", 0)),
        ("a.py::t[flaky3]", ("a.py::t", 3)),
        ("a.py::t[trio-x-flaky12]", ("a.py::t[trio-x]", 12)),
        ("a.py::t[flaky]", ("a.py::t[flaky]", 0)),
    ],
)
def test_a_run_has_the_id_of_its_test(nodeid: str, expected: tuple[str, int]) -> None:
    assert split(nodeid) == expected


def test_runs_are_counted_when_they_end_or_fail() -> None:
    record = Record("c", {HERE: Counted("thread")})
    ended, texts = record.add(
        [
            line(HERE, "setup"),
            line(HERE, "call", run=1),
            line(HERE, "teardown"),  # run 0 ended, run 1 was stopped
            line(HERE, "call", "failed", run=2),
            line(HERE, "teardown", "failed", run=2),
            line(HERE, "???", "failed", run=3),  # its process died
            line(THERE, "setup", "skipped"),
            line(THERE, "teardown"),
        ]
    )
    assert ended == 4
    assert texts == {HERE: f"{HERE} 2 call broke"}
    assert record.tests[HERE] == Counted("thread", runs=3, failures=2, seconds=3.0)
    assert record.tests[THERE] == Counted("", runs=1, skipped=1, seconds=1.0)
    assert list(record.failed()) == [HERE]


def test_the_group_that_is_furthest_behind_is_next() -> None:
    record = Record("c")
    record.choose({ELSEWHERE: ("process", "x"), THERE: ("broker", "x"), HERE: ("thread", "x")})
    order: list[tuple[str, dict[str, int]]] = []
    while (piece := record.next_slice(repeats=2, seconds=120.0, processes=3)) is not None:
        order.append((piece.name, dict(piece.wanted or {})))
        record.add(line(test, run=run) for test, runs in piece.wanted.items() for run in range(runs))  # type: ignore[union-attr]
    groups = ["tests/runtime", "tests/kafka", "tests/history"]
    assert order == [
        (group, {test: 1}) for _ in range(2) for group, test in zip(groups, (HERE, THERE, ELSEWHERE), strict=True)
    ]
    assert all(one.runs == 2 for one in record.tests.values())


@pytest.mark.parametrize(("seconds_a_run", "times"), [(0.01, MOST_AT_ONCE), (10.0, 5), (500.0, 1)])
def test_a_slice_is_as_large_as_its_time(seconds_a_run: float, times: int) -> None:
    other = HERE.replace("test_a", "test_z")
    record = Record(
        "c", {HERE: Counted("thread", runs=1, seconds=seconds_a_run), other: Counted("thread", runs=3, seconds=0.0)}
    )
    piece = record.next_slice(seconds=50.0, processes=1)
    assert piece is not None
    # The other is ahead, and gets what brings it to the same number.
    wanted = {HERE: times, other: times - 2}
    assert piece.wanted == {name: runs for name, runs in wanted.items() if runs > 0}


def test_what_is_missing_is_asked_for_by_path() -> None:
    record = Record(
        "c", {HERE: Counted("thread", runs=29), THERE: Counted("broker"), ELSEWHERE: Counted("process", runs=REPEATS)}
    )
    record.tests["tests/test_pure.py::test"] = Counted("")  # a full run has it, no rule
    assert record.missing() == {HERE: 1, THERE: REPEATS}
    assert record.missing(["tests/runtime"]) == {HERE: 1}
    assert record.next_slice(["tests/history"], seconds=120.0, processes=3) is None
    assert group_of(HERE) == "tests/runtime"


def test_a_test_that_is_gone_is_not_waited_for() -> None:
    record = Record("c")
    assert record.choose({HERE: ("thread", "x"), THERE: ("broker", "y")}) == 0
    record.add([line(THERE)])
    assert record.choose({HERE: ("timer", "x")}) == 0
    assert record.missing() == {HERE: REPEATS}
    assert record.tests == {HERE: Counted("timer", "x"), THERE: Counted("", "y", 1, seconds=0.5)}


def test_a_test_that_is_made_otherwise_begins_anew() -> None:
    record = Record("c")
    record.choose({HERE: ("thread", "x"), THERE: ("broker", "y")})
    record.add([line(HERE, outcome="failed"), line(THERE)])
    record.tests[HERE].first = "failures/a.txt"
    assert record.choose({HERE: ("thread", "mended"), THERE: ("broker", "y")}) == 1
    assert record.missing() == {HERE: REPEATS, THERE: REPEATS - 1}
    assert not record.failed()
    assert record.mended == {HERE: "1 of 1: failures/a.txt"}
    assert f"mended since, FAILED 1 of 1: failures/a.txt: {HERE}" in program.table(record, repeats=REPEATS)


def test_a_test_that_no_rule_chooses_begins_anew_too() -> None:
    record = Record("c")
    record.add([line(HERE, outcome="failed")])
    assert record.failed()
    record.choose({HERE: ("", "mended")})
    assert not record.failed() and not record.missing()


def test_full_runs_tell_whether_they_ran_the_tests_as_they_are() -> None:
    record = Record("c", full=[(1.0, "others"), (2.0, everything())])
    assert "full runs: 2 of 3, with all tests as they are now: 1" in program.table(record, repeats=REPEATS)


@pytest.mark.parametrize("stopped", [False, True])
def test_what_runs_while_files_change_is_not_counted(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record("c", {HERE: Counted("thread")})
    digests = iter(["before", "after"])
    monkeypatch.setattr(program, "FOLDER", tmp_path)
    monkeypatch.setattr(program, "everything", lambda: next(digests))
    flaky = program.Flaky(record, processes=1, burners=0, until=float("inf"))

    def run(*options: str) -> bool:
        (tmp_path / "results.jsonl").write_text(json.dumps(line(HERE, outcome="failed")) + "\n")
        if stopped:
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(flaky, "_pytest", run)
    with pytest.raises(program.FlakyError, match="files were changed while tests/runtime ran"):
        flaky.run(Slice("tests/runtime", {HERE: 1}))
    assert not record.tests[HERE].runs and not list(tmp_path.glob("results*"))
    (text,) = (tmp_path / "failures").iterdir()
    assert f"{HERE} 0 teardown broke" in text.read_text()
    assert f"FAILED, and is not counted: {HERE}: {text}" in capsys.readouterr().out


class Late(program.Flaky):
    """Its time is over as soon as pytest has written something."""

    @property
    def left(self) -> float:
        wait_until(lambda: program.results().exists() and program.results().stat().st_size > 0, "a line is written")
        return 0.0


def test_what_the_end_of_the_time_breaks_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, results, child = (tmp_path / name for name in ("python", "results.jsonl", "child"))
    python.write_text(
        "#!/bin/sh\n"
        f"trap 'echo second >> {results}; exit 2' INT\n"
        f"sleep 1000 & echo $! > {child}\n"
        f"echo first >> {results}\n"
        "wait\n"
    )
    python.chmod(0o700)
    monkeypatch.setattr(program, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.executable", str(python))
    late = Late(Record("c"), processes=1, burners=0, until=0.0)
    assert not late._pytest()
    assert results.read_text() == "first\n"
    wait_until(lambda: is_gone(int(child.read_text())), "what it had started has ended")


def test_each_failure_has_a_text_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "FOLDER", tmp_path)
    texts = [program.write_failure(test, f"{number}") for number, test in enumerate((HERE, THERE, HERE))]
    assert [text.read_text().split()[-1] for text in texts] == ["0", "1", "2"]


def test_what_a_test_is_made_of_is_its_file_its_helpers_and_what_it_names(tmp_path: Path) -> None:
    def now() -> tuple[str, str, str]:
        made_of.cache_clear()
        imports_of.cache_clear()
        return (
            product(tmp_path),
            made_of(tmp_path / "tests" / "runtime" / "test_a.py", tmp_path),
            made_of(tmp_path / "tests" / "docs" / "test_b.py", tmp_path),
        )

    def changed(path: str, text: str) -> list[bool]:
        before = now()
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        return [one != other for one, other in zip(before, now(), strict=True)]

    for path, text in (("runtime/test_a.py", "from tests import helper\n"), ("docs/test_b.py", "ROOT / 'docs'\n")):
        (tmp_path / "tests" / path).parent.mkdir(parents=True)
        (tmp_path / "tests" / path).write_text(text)
    assert changed("lanes/engine.py", "") == [True, False, False]
    assert changed("lanes/engine.py", "x = 1") == [True, False, False]
    assert changed("lanes/__pycache__/engine.pyc", "x") == [False, False, False]
    assert changed("tests/components/server.py", "x = 1") == [True, False, False]
    assert changed("tests/helper.py", "import json") == [False, True, False]
    assert changed("tests/runtime/test_a.py", "from tests import helper\nx = 1") == [False, True, False]
    assert changed("tests/runtime/conftest.py", "x = 1") == [False, True, False]
    assert changed("tests/runtime/started.py", "x = 1") == [False, True, False]
    assert changed("tests/runtime/test_z.py", "x = 1") == [False, False, False]
    assert changed("docs/design.md", "x") == [False, False, True]
    assert changed("docs/out/figures.json", "x") == [False, False, False]
    assert changed("CHANGELOG.md", "x") == [False, False, False]


def test_what_is_digested_is_there() -> None:
    """Of a folder with another name nothing would be seen to change."""
    assert [name for name in (*PRODUCT, *READ) if not list(ROOT.glob(f"{name}*"))] == []


def test_a_record_goes_on_where_it_was_and_belongs_to_its_product(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = program.record_of("a" * 16, tmp_path)
    record.choose({HERE: ("thread", "x")})
    record.add([line(HERE, "call", "failed"), line(HERE)])
    record.full.append((12.5, "x"))
    record.slices.append("a slice")
    record.write(tmp_path / "state.json")
    (tmp_path / "failures").mkdir()
    (tmp_path / "results.jsonl").write_text("of a start that was killed")
    assert program.record_of("a" * 16, tmp_path) == record
    assert program.record_of("b" * 16, tmp_path) == Record("b" * 16)
    assert "begun anew, for another product was tested" in capsys.readouterr().out
    (aside,) = tmp_path.iterdir()
    assert {path.name for path in aside.iterdir()} == {"state.json", "failures", "results.jsonl"}


def test_a_record_of_an_earlier_version_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"commit": "c", "tests": {}, "full": [1.5], "slices": []}))
    assert program.record_of("a", tmp_path) == Record("a")
    assert [path.name for aside in tmp_path.iterdir() for path in aside.iterdir()] == ["state.json"]


def test_the_plugin_runs_each_test_so_often_and_writes_each_phase(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="""
        import pytest
        runs = []

        def test_second_fails():
            runs.append(1)
            assert len(runs) < 2

        @pytest.mark.parametrize("x", ["a", "b"])
        def test_each(x):
            pass
        """
    )
    wanted, results = pytester.path / "wanted.json", pytester.path / "results.jsonl"
    wanted.write_text(json.dumps({"test_it.py::test_second_fails": 3, "test_it.py::test_each[b]": 1}))
    options = ["-p", "tests.flaky.plugin", "-p", "no:randomly", f"--flaky-slice={wanted}", f"--flaky-results={results}"]
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=2, failed=2, deselected=5)
    record = Record("c")
    ended, texts = record.add(map(json.loads, results.read_text().splitlines()))
    assert ended == 4
    assert {name: (one.runs, one.failures) for name, one in record.tests.items()} == {
        "test_it.py::test_second_fails": (3, 2),
        "test_it.py::test_each[b]": (1, 0),
    }
    assert "assert 2 < 2" in texts["test_it.py::test_second_fails"]


def test_the_plugin_writes_what_it_chooses(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_threads="import threading\ndef test_a():\n    pass\n", test_pure="def test_b():\n    pass\n"
    )
    chosen = pytester.path / "chosen.json"
    pytester.runpytest_inprocess("-p", "tests.flaky.plugin", "--collect-only", f"--flaky-choose={chosen}")
    assert json.loads(chosen.read_text()) == {
        "test_threads.py::test_a": ["thread", made_of(pytester.path / "test_threads.py")],
        "test_pure.py::test_b": ["", made_of(pytester.path / "test_pure.py")],
    }


def test_the_load_ends_with_its_block() -> None:
    with load(2) as burning:
        assert not any(is_gone(pid) for pid in burning)
    assert all(is_gone(pid) for pid in burning)


def test_the_load_ends_with_a_parent_that_is_killed(spawn: Any) -> None:
    code = "from tests.flaky.load import load\nwith load(1) as burning:\n    print(*burning, flush=True)\n    input()"
    parent = spawn("-c", code)
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: is_gone(pid), "the load to end")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeats", "0"], "--repeats 0: must be 1 or more"),
        (["--seconds", "0"], "--seconds 0.0: must be more than 0"),
        (["--load", "-1"], "--load -1: must be 0 or more"),
        (["tests/nowhere"], "'tests/nowhere': must be `full`, or a file or folder of the project"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(arguments)
    assert said in capsys.readouterr().err
