"""Plots show exactly the figures that the benchmark cases have written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import pytest

from bench import zone
from bench.__main__ import command
from bench.figures import Figure, rate, write
from bench.panels import Bars, gid
from bench.plots import DRAWN, FROM_PAGE, KAFKA, LOSS, PLOTS, Measured, Published, draw
from tests.project.asked_by_plots import asked_by_plots

ROOT: Final = Path(__file__).resolve().parents[2]
SVG: Final = "{http://www.w3.org/2000/svg}"
PAGES: Final = ("#ffffff", "#0d1117")
READABLE: Final = 3.0  # the contrast that WCAG 2 requires of graphics and large text


def write_sample(folder: Path) -> None:
    """Write a file for each case, with all figures that the plots read; each figure has a different ratio."""
    cases: dict[str, list[Figure]] = {}
    for number, (case, name) in enumerate(asked_by_plots()):
        cases.setdefault(case, []).append(rate(name, "unit", 10.0 + number, 40.0 + 7 * (number % 3), 1.5))
    for case, figures in cases.items():
        write(case, figures, folder)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    write_sample(folder)
    return folder


@pytest.fixture(scope="module")
def drawn(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plots")
    assert draw([], folder=sample, into=folder) == 0
    return folder


def texts_of(file: Path) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.parse(file).iter(f"{SVG}text")]


def points_of(file: Path, named: str) -> list[tuple[float, float]]:
    """Return the corners of the path with this id."""
    (group,) = [one for one in ElementTree.parse(file).iter(f"{SVG}g") if one.get("id") == named]
    path = group.find(f"{SVG}path")
    assert path is not None
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path.attrib["d"])]


def test_each_plot_is_a_picture_with_its_labels(drawn: Path) -> None:
    assert {file.name for file in drawn.iterdir()} == {f"{name}.svg" for name in DRAWN}
    shown = {name: texts_of(drawn / f"{name}.svg") for name in DRAWN}
    assert {"Beside a plain loop", "Beside a bare task for each key", "1 key", "1,000 keys"} <= set(shown["zone"])
    assert set(zone.WAITS) <= set(shown["zone"])
    assert shown["zone"].count(LOSS) == 2  # one for each panel
    assert {"a whole run, no-op handler", "a plain loop", "100,000", "the engine alone"} <= set(shown["scaling"])
    assert {LOSS, "goal", *KAFKA} <= set(shown["kafka"])
    assert {LOSS, "no-op, beside foreachPartition"} <= set(shown["spark"])
    assert {"in-process source", "JetStream", "Kafka", "goal"} <= set(shown["stuck"])
    assert LOSS not in shown["stuck"] + shown["handover"]
    assert {"Kafka, KIP-848: kill -9, session 3 s", "seconds"} <= set(shown["handover"])


def test_a_line_of_a_plot_goes_through_the_measured_points(sample: Path, drawn: Path) -> None:
    measured = Measured(sample)
    points = points_of(drawn / "zone.svg", gid("Beside a plain loop", "10 keys"))
    ratios = [measured.figure("zone", zone.name(wait, 10)).ratio for wait in zone.WAITS]
    assert len(points) == len(ratios) == len(zone.WAITS)
    steps = [(right[0] - left[0], right[1] - left[1]) for left, right in pairwise(points)]
    assert [across for across, _down in steps] == pytest.approx([steps[0][0]] * len(steps), rel=1e-4)
    # On a logarithmic axis, a factor of ten has the same height everywhere. In SVG, y grows downwards.
    scales = [down / math.log(right / left) for (_, down), (left, right) in zip(steps, pairwise(ratios), strict=True)]
    assert scales == pytest.approx([scales[0]] * len(scales), rel=1e-4)
    assert scales[0] < 0


def test_a_bar_of_a_plot_has_the_measured_length(sample: Path, drawn: Path) -> None:
    measured = Measured(sample)
    lengths = []
    for label, which in KAFKA.items():
        across = [x for x, _y in points_of(drawn / "kafka.svg", gid("Kafka: messages a second", label))]
        lengths.append((max(across) - min(across)) / measured.figure(*which).ratio)
    assert lengths == pytest.approx([lengths[0]] * len(KAFKA), rel=1e-4)
    assert any(text.startswith("1.") and text.endswith("; goal 1.5 ×") for text in texts_of(drawn / "kafka.svg"))


def test_the_same_figures_are_the_same_file(sample: Path, drawn: Path, tmp_path: Path) -> None:
    assert draw(["zone", "kafka", "zone"], folder=sample, into=tmp_path) == 0
    for name in ("zone", "kafka"):
        text = (tmp_path / f"{name}.svg").read_text()
        assert text == (drawn / f"{name}.svg").read_text()
        assert "dc:date" not in text and "Matplotlib v" not in text
    assert len(list(tmp_path.iterdir())) == 2


def test_every_colour_stands_out_on_light_and_dark(drawn: Path) -> None:
    used = {
        colour
        for file in drawn.iterdir()
        # The shaded area is the zone, which is drawn behind the other shapes.
        for style in re.findall(r'style="([^"]+)"', file.read_text())
        if "opacity" not in style
        for colour in re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", style)
    }
    assert len(used) > 4
    assert [(one, page) for one in used for page in PAGES if contrast(one, page) < READABLE] == []


def contrast(one: str, other: str) -> float:
    """How far two colours are apart in brightness, as WCAG 2 reckons it: 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


Rows = list[dict[str, Any]]


def changed(change: Callable[[Rows], object]) -> Callable[[Path], None]:
    """Change what the file holds."""

    def to(file: Path) -> None:
        rows = json.loads(file.read_text())
        change(rows)
        file.write_text(json.dumps(rows))

    return to


BROKEN: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "missing": (Path.unlink, "spark.json is missing; "),
    "half written": (lambda file: file.write_text(file.read_text()[:99]), "spark.json is not JSON: "),
    "one figure": (lambda file: file.write_text("{}"), "spark.json is not a list of figures but dict; "),
    "without a field": (changed(lambda rows: rows[0].pop("ratio")), "spark.json holds {'case': 'spark no-op', "),
    "without a name": (changed(lambda rows: rows[0].update(case=None)), "spark.json holds {'case': None, "),
    "not a row": (changed(lambda rows: rows.append(7)), "spark.json holds 7, which is not {case, figure, "),  # type: ignore[arg-type]
    "no number": (changed(lambda rows: rows[0].update(ratio="1")), "says ratio='1' of \"spark no-op\", not a number"),
    "nothing": (changed(lambda rows: rows[0].update(ratio=0)), 'says ratio=0 of "spark no-op", not a number above 0; '),
    "no figure": (changed(lambda rows: rows[0].update(figure=float("nan"))), "says figure=nan of "),
    "a goal in words": (
        changed(lambda rows: rows[0].update(goal="2")),
        "says goal='2' of \"spark no-op\", not a number",
    ),
    "without a figure": (changed(lambda rows: rows.pop()), 'spark.json has no figure "spark 5 ms handler, 4,096 lanes'),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_missing_measurement_is_not_drawn(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, into = tmp_path / "out", tmp_path / "plots"
    write_sample(out)
    spoil, said = BROKEN[how]
    spoil(out / "spark.json")
    assert draw(["stuck", "spark"], folder=out, into=into) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bench: {out}/spark.json ")
    assert said in line
    assert line.endswith("; measure it with `python -m bench spark`")
    assert not into.exists()


def test_an_unknown_plot_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plots", "zone", "zones"]) == 2
    assert capsys.readouterr().err == f"bench: unknown plot 'zones'; use {', '.join(DRAWN)}\n"


def test_the_page_shows_each_plot_that_is_there() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert sorted(re.findall(r"!\[[^]]+\]\(plots/(.+?)\.svg\)", page)) == sorted(DRAWN)
    assert {file.name for file in PLOTS.iterdir()} == {f"{name}.svg" for name in DRAWN}


@pytest.mark.parametrize("name", FROM_PAGE)
def test_the_pictures_of_the_page_have_the_figures_of_its_table(name: str) -> None:
    panels = DRAWN[name](Published())
    assert isinstance(panels, Bars)
    shown = texts_of(PLOTS / f"{name}.svg")
    assert [bar.text for bar in panels.bars if bar.text not in shown] == []
