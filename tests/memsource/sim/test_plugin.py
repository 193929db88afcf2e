"""The pytest plugin: its options, the tests they select, and its lines in the summary."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import memsource
from lanes import Message
from memsource.sim.plans.plan import Fault, Plan, Schedule
from memsource.sim.plans.token import encode
from memsource.sim.runs.simulate import OPTIONS

pytest_plugins = ["pytester"]

TESTS = """
import anyio
import memsource
import pytest

db = {}

async def right(message):
    await anyio.sleep(0.01)
    db[message.partition.id.number, message.position] = 1

async def wrong(message):
    await anyio.sleep(0.01)
    db["count"] = db.get("count", 0) + 1

def simulated(handler):
    async def test(world):
        world.produce("orders", n=10, keys=3)
        world.workers(2, handler)
        await world.settled()
        world.check(state=lambda: dict(db))
    return memsource.simulate(runs=30, faults=memsource.faults(crash=1, rebalance=1), setup=db.clear)(test)

test_right = simulated(right)
test_wrong = simulated(wrong)

def test_plain():
    pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> Iterator[pytest.Pytester]:
    """A project with a simulated test that passes, a simulated test that fails, and a plain test."""
    pytester.makepyfile(test_orders=TESTS)
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    before = OPTIONS.runs, OPTIONS.replay, OPTIONS.test
    yield pytester
    # A run restores the options, or the simulated tests after this one would differ.
    assert (OPTIONS.runs, OPTIONS.replay, OPTIONS.test) == before


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider", *arguments)


@pytest.mark.long
def test_a_line_for_each_simulated_test(project: pytest.Pytester) -> None:
    result = run(project)
    result.assert_outcomes(passed=2, failed=1)
    lines = [line for line in result.outlines if " virtual hours, " in line]
    assert len(lines) == 2
    told = re.fullmatch(
        r"test_orders\.py::test_right: 30 runs, \d+\.\d virtual hours, (\d+) crash points, (\d+) faults", lines[0]
    )
    assert told is not None
    assert 0 < int(told[1]) < int(told[2])
    assert lines[1].startswith("test_orders.py::test_wrong: ")
    result.stdout.fnmatch_lines(["*= simulated by lanes =*"])


def test_without_a_simulated_test_the_summary_has_no_line(project: pytest.Pytester) -> None:
    result = run(project, "-k", "plain")
    result.assert_outcomes(passed=1, deselected=2)
    assert "simulated by lanes" not in result.stdout.str()


def test_an_option_sets_the_number_of_runs(project: pytest.Pytester) -> None:
    result = run(project, "--lanes-runs", "3", "-k", "right")
    result.assert_outcomes(passed=1, deselected=2)
    result.stdout.fnmatch_lines(["test_orders.py::test_right: 3 runs, *"])


@pytest.mark.parametrize("runs", ["0", "-1", "many", "1e3", "10000001"])
def test_an_invalid_number_of_runs_is_refused(project: pytest.Pytester, runs: str) -> None:
    result = run(project, f"--lanes-runs={runs}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*'{runs}': must be a whole number of runs in 1 … 10000000*"])


@pytest.mark.long
def test_a_failing_test_prints_the_token_that_repeats_it(project: pytest.Pytester) -> None:
    failed = run(project, "-k", "wrong")
    printed = re.search(r"replay: pytest --lanes-replay (lanes1-\S+)", failed.stdout.str())
    assert printed is not None
    result = run(project, "--lanes-replay", printed[1], "-k", "wrong")
    result.assert_outcomes(failed=1, deselected=2)
    found = next(line for line in failed.outlines if "FaultDifferential: " in line)
    assert found in result.outlines
    assert "the replayed run passed" not in result.stdout.str()


@pytest.mark.long
def test_the_printed_command_replays_in_the_failing_test_alone(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_more="""
import pytest
from test_orders import simulated, right, wrong

test_right = simulated(right)

class TestOrders:
    @pytest.mark.parametrize("name", ["a b"])
    def test_plain(self, name):
        pass

    test_wrong = staticmethod(simulated(wrong))
"""
    )
    failed = run(project, "test_more.py", "test_orders.py", "-k", "wrong")
    # A summary that is not cut, as under CI, repeats the lines.
    commands = set(re.findall(r"replay: (pytest .*)", failed.stdout.str()))
    assert [shlex.split(each)[-1] for each in sorted(commands)] == [
        "test_more.py::TestOrders::test_wrong",
        "test_orders.py::test_wrong",
    ]
    for command in commands:
        result = run(project, *shlex.split(command)[1:])
        result.assert_outcomes(failed=1)
        assert "deselected" not in result.stdout.str()


def test_the_printed_id_is_quoted_and_relative_to_the_working_directory(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := project.path / "some tests").mkdir()
    (folder / "test_parameters.py").write_text(
        "import memsource, pytest\n"
        "@pytest.mark.parametrize('name', ['a b'])\n"
        "@memsource.simulate(runs=3)\n"
        "async def test_of(world, name):\n"
        "    assert not name\n"
    )
    for directory, id_of in ((project.path, "some tests/test_parameters.py"), (folder, "test_parameters.py")):
        monkeypatch.chdir(directory)
        failed = run(project, id_of)
        (command,) = set(re.findall(r"replay: pytest --lanes-replay lanes1-\S+ (.*)", failed.stdout.str()))
        assert command == f"'{id_of}::test_of[a b]'"


def test_a_token_is_refused_for_several_tests(project: pytest.Pytester) -> None:
    token = encode(Plan("jetstream", 4, (Fault(3, "crash"),), Schedule(((5, 1),))))
    result = run(project, "--lanes-replay", token)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "ERROR: --lanes-replay: a token belongs to one test, and 2 simulated tests are selected *",
        ]
    )
    assert "(test_orders.py::test_right, test_orders.py::test_wrong); add the id of the test" in result.stderr.str()


REFUSED = """
import memsource
import threading

async def handle(message):
    connect()

def connect():
    threading.Thread(target=print).start()  # refused here

def simulated(start):
    async def test(world):
        world.produce("orders", n=5)
        start(world)
        await world.settled()
    return memsource.simulate(runs=4)(test)

test_thread = simulated(lambda world: world.workers(1, handle))
test_plan = simulated(lambda world: world.workers(0, handle))
"""


def test_a_refusal_shows_the_line_of_the_test_and_no_internal_frame(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_refused=REFUSED)
    result = run(pytester)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines([">*start()  # refused here", "E *Refused: threading.Thread.start, called at *"])
    result.stdout.fnmatch_lines(["E *ImpossiblePlan: *"])
    internal = re.compile(r"(memsource/(sim|pytest)|lanes/|asyncio/|anyio/)\S*:\d+")
    assert [line for line in result.outlines if internal.search(line)] == []


def test_a_refused_argument_shows_no_internal_frame(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import memsource\n\n@memsource.simulate(runs=-1)\nasync def test_orders(world):\n    pass\n")
    result = run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["E *ImpossiblePlan: runs=-1: must be a whole number, 1 or more"])
    assert [line for line in result.outlines if re.search(r"memsource/sim/\S*:\d+", line)] == []


def test_a_replay_runs_only_simulated_tests(project: pytest.Pytester) -> None:
    token = encode(Plan("jetstream", 4, (Fault(3, "crash"),), Schedule(((5, 1),))))
    result = run(project, "--lanes-replay", token, "-k", "right or plain")
    result.assert_outcomes(passed=1, deselected=2)
    assert "virtual hours" not in result.stdout.str()
    result.stdout.fnmatch_lines(
        ["--lanes-replay: the replayed run passed, so the failure is mended, or the token bel*"]
    )


def test_a_refused_token_ends_the_session_before_any_test(project: pytest.Pytester) -> None:
    result = run(project, "--lanes-replay", "lanes1-AAAA")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --lanes-replay: replay token 'lanes1-AAAA': is damaged*"])
    assert "test session starts" not in result.stdout.str()


def test_the_report_belongs_to_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(message: Message) -> None:
        """Do nothing."""

    @memsource.simulate(runs=3)
    async def test(world: memsource.World) -> None:
        world.produce("orders", n=3)
        world.workers(1, handle)
        await world.settled()

    assert test.report is None
    test()
    report: object = test.report
    assert isinstance(report, memsource.CampaignReport)
    assert report.runs == 3
    monkeypatch.setattr(OPTIONS, "replay", encode(Plan("kafka", 1)))
    test()
    assert test.report is None


def test_the_plugin_is_registered_for_every_test_run() -> None:
    found = entry_points(group="pytest11", name="lanes")
    assert [entry.value for entry in found] == ["memsource.pytest_plugin"]


@pytest.mark.process
def test_the_plugin_imports_the_simulator_only_for_simulated_tests(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(
        "import sys\n"
        "def test_plain():\n"
        "    assert 'memsource.pytest_plugin' in sys.modules\n"
        "    assert not {'lanes', 'memsource.sim', 'blake3'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_exported_name_is_there() -> None:
    assert [name for name in memsource.__all__ if getattr(memsource, name, None) is None] == []
    assert set(memsource.__all__) <= set(dir(memsource))
    with pytest.raises(AttributeError, match="module 'memsource' has no attribute 'simulated'"):
        getattr(memsource, "simulated")  # noqa: B009


@pytest.mark.process
def test_simulate_works_without_hypothesis() -> None:
    program = "import sys; sys.modules['hypothesis'] = None; from memsource import *"
    subprocess.run([sys.executable, "-W", "error", "-c", program], timeout=50, check=True)
