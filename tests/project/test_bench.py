"""The benchmarks run and write their results to files.

The tests measure no times.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import CASES, command, main
from bench.figures import Effort, cost, interleaved, middle, pairs, rate, table
from tests.components import MissingComponent
from tests.components.nats_server import find_program
from tests.components.postgres_server import find_programs
from tests.project.asked_by_plots import asked_by_plots
from tests.spark.conftest import need_java

TINY = Effort(scale=0.002, repeats=1)
ON_KAFKA = [name for name in CASES if name.startswith(("kafka", "http"))]
OF_COHORTS = [name for name in CASES if name.startswith("cohort")]
ON_SPARK = [name for name in CASES if name.startswith("spark")]
OF_PLOTS = ["zone", "scaling"]
IN_PROCESSES = ["jetstream-light", "postgres-log", "postgres-ranges"]
NEEDED: dict[str, Callable[[], object]] = {
    **{name: find_program for name in CASES if name.startswith("jetstream")},
    "postgres": find_programs,
}
FIELDS = {"case": str, "figure": float, "unit": str, "baseline": float, "ratio": float}


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ON_KAFKA + OF_COHORTS + ON_SPARK + OF_PLOTS + IN_PROCESSES]
)
def test_a_case_of_the_benchmark_writes_its_figures(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDED and not os.environ.get("CI"):
        try:
            NEEDED[name]()
        except MissingComponent as missing:
            pytest.skip(str(missing))
    measure(name, tmp_path, capsys)


@pytest.mark.slow  # many small measurements, some of them with waits
@pytest.mark.parametrize("name", OF_PLOTS)
def test_a_case_for_plots_writes_its_figures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(name, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.timeout(180)  # processes for each measurement, and messages that arrive slowly
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_a_case_with_processes_writes_its_figures(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(name, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.timeout(180)  # a private broker, and waits for the end of sessions
@pytest.mark.usefixtures("kafka_prepared")
@pytest.mark.parametrize("name", ON_KAFKA)
def test_a_case_on_kafka_writes_its_figures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(name, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.timeout(180)  # members join repeatedly, and a lease expires
@pytest.mark.parametrize("name", OF_COHORTS)
def test_a_case_of_a_cohort_writes_its_figures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(name, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.timeout(300)  # a private JVM
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
@pytest.mark.parametrize("name", ON_SPARK)
def test_a_case_on_spark_writes_its_figures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_java()
    measure(name, tmp_path, capsys)


def measure(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Before each measurement, garbage is collected, which takes seconds after many other tests. The objects stay
    # frozen: `gc.unfreeze` would also return those that the session froze, and slow down every later collection.
    gc.collect()
    gc.freeze()
    assert main([name], effort=TINY, folder=tmp_path) == 0
    (file,) = tmp_path.iterdir()
    assert file.name == f"{name}.json"
    figures: list[dict[str, Any]] = json.loads(file.read_text())
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(figures) + 1
    for figure, line in zip(figures, shown[1:], strict=True):
        assert list(figure) == ["case", "figure", "unit", "baseline", "ratio", "goal", "holds"]
        assert all(isinstance(figure[field], kind) for field, kind in FIELDS.items())
        assert figure["case"].startswith(name)
        assert figure["figure"] > 0 < figure["baseline"]
        assert figure["ratio"] == figure["figure"] / figure["baseline"]
        assert (figure["goal"] is None) == (figure["holds"] is None)
        assert line.startswith(figure["case"])
    assert {asked for case, asked in asked_by_plots() if case == name} <= {figure["case"] for figure in figures}


def test_an_unknown_case_of_the_benchmark_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "motor"], effort=TINY, folder=tmp_path) == 2
    said = capsys.readouterr()
    assert said.err == f"bench: unknown case 'motor'; use {', '.join(CASES)}\n"
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_benchmark_prints_how_much_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], Effort]] = []

    def note(names: list[str], *, effort: Effort) -> int:
        asked.append((names, effort))
        return 0

    monkeypatch.setattr("bench.__main__.main", note)
    assert command(["--scale", "0.5", "engine", "runtime"]) == command(["--repeats", "2"]) == 0
    assert asked == [(["engine", "runtime"], Effort(scale=0.5)), ([], Effort(repeats=2))]


def test_a_benchmark_without_its_server_prints_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_server(effort: Effort) -> Any:
        raise MissingComponent("nats-server is missing: install it")

    monkeypatch.setitem(CASES, "jetstream", no_server)
    assert main(["jetstream"], effort=TINY, folder=tmp_path) == 1
    assert capsys.readouterr().err.splitlines()[1:] == ["bench: nats-server is missing: install it"]


def test_a_cost_meets_its_goal_from_below_and_a_rate_from_above() -> None:
    assert [cost("c", "µs", figure, 0.5, 0.6).holds for figure in (0.5, 0.6, 0.7)] == [True, True, False]
    assert [rate("r", "1/s", figure, 100.0, 0.8).holds for figure in (79.0, 80.0, 120.0)] == [False, True, True]
    assert (cost("c", "µs", 1.0, 0.5).holds, rate("r", "1/s", 1.0, 0.5).goal) == (None, None)
    assert [rate("r", "1/s", figure, 50.0).at_least(100).holds for figure in (99.0, 100.0)] == [False, True]
    assert cost("c", "µs", 1.0, 0.5).ratio == rate("r", "1/s", 1.0, 0.5).ratio == 2.0


def test_runs_take_turns_and_the_median_counts() -> None:
    order: list[str] = []

    def run(name: str, values: list[float]) -> float:
        order.append(name)
        return values.pop()

    a, b = [5.0, 1.0, 3.0], [2.0, 2.0, 9.0]
    assert interleaved([lambda: run("a", a), lambda: run("b", b)], 3) == [3.0, 2.0]
    assert order == ["a", "b"] * 3


def test_pairs_take_turns_and_the_one_with_the_median_ratio_counts() -> None:
    order: list[str] = []

    def run(name: str, values: list[float]) -> float:
        order.append(name)
        return values.pop()

    a, b = [9.0, 4.0, 2.0], [3.0, 2.0, 2.0]
    measured = pairs(lambda: run("a", a), lambda: run("b", b), 3)
    assert order == ["b", "a"] * 3
    assert measured == [(2.0, 2.0), (4.0, 2.0), (9.0, 3.0)]
    assert middle(measured) == (4.0, 2.0)


def test_each_figure_has_a_line_in_the_table() -> None:
    lines = table([cost("engine", "µs", 0.512, 0.25, 0.6), rate("net", "messages/s", 91_234.5, 100_000.0)])
    assert lines.splitlines() == [
        "case    figure  unit        baseline  ratio  goal  holds",
        "engine   0.512  µs              0.25   2.05   0.6    yes",
        "net     91,234  messages/s   100,000   0.91",
    ]
