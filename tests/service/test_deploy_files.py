"""The files of ``examples/deploy``: metrics that ``lanes run`` exports, probes, grace period, figures of the guide."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lanes import Settings
from lanes.observe.otel import Telemetry
from lanes.process import EXIT_DRAINED
from tests.fakes.telemetry import count_everything, message, status, use
from tests.service.programs import ROOT, get, running
from tests.service.test_service_port import free_address

yaml: Any = importlib.import_module("yaml")  # of mkdocs; it has no types

FOLDER: Final = ROOT / "examples" / "deploy"
RULES: Final[list[dict[str, Any]]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
BOARD: Final[dict[str, Any]] = json.loads((FOLDER / "grafana.json").read_text())
DEPLOYMENT: Final[dict[str, Any]] = yaml.safe_load((FOLDER / "kubernetes.yml").read_text())
POD: Final[dict[str, Any]] = DEPLOYMENT["spec"]["template"]["spec"]
CONTAINER: Final[dict[str, Any]] = POD["containers"][0]

FUNCTIONS: Final = {
    *("and", "avg_over_time", "by", "changes", "histogram_quantile", "increase", "label_values", "max", "or", "rate"),
    *("sum", "topk", "unless"),
}
OF_THE_SCRAPE: Final = {"instance", "job"}
"""Labels that Prometheus adds."""
ONLY_AFTER_A_FAULT: Final = {
    "lanes_dead_letters_total",
    "lanes_expiring_left_seconds",
    "lanes_output_failures_total",
    "lanes_redelivered_total",
    "lanes_zombies_total",
}
"""Metrics that the consumer of this test does not have."""

APP: Final = """
import os, pathlib, time
import lanes
from memsource import Group, GroupSource

pathlib.Path(f"started-{os.getpid()}").touch()


class Source(GroupSource):
    def lag(self, partition):
        return 3

    def outage(self):
        return None


async def handle(message):
    if message.key == b"slow":
        time.sleep(0.3)
    if message.key == b"poison":
        raise ValueError


def consumer():
    group = Group()
    for key in ("good", "slow", "poison"):
        group.publish("x", key=key)
    settings = lanes.Settings(poison="block", retry=lanes.Retry(attempts=2, backoff=0.0))
    return lanes.Consumer(Source(group, "member"), handle, settings=settings)
"""

Names = Mapping[str, set[str]]
"""The labels of each metric."""


def exported(text: str) -> Names:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def asked(expression: str) -> tuple[Names, list[set[str]]]:
    """The labels of each metric of an expression, and the labels of each grouping."""
    variable = re.fullmatch(r"label_values\((.*), (\w+)\)", expression)
    groups = [set(re.split(r",\s*", grouped)) for grouped in re.findall(r"\bby\s*\(([^)]*)\)", expression)]
    bare = re.sub(r"\bby\s*\([^)]*\)|\[[^\]]*\]", " ", expression if variable is None else variable[1])
    found: dict[str, set[str]] = {}
    for metric, selector in re.findall(r"\b([a-zA-Z_]\w*)(?:\{([^}]*)\})?", re.sub(r'"[^"]*"', '""', bare)):
        if metric not in FUNCTIONS:
            found.setdefault(metric, set()).update(re.findall(r"(\w+)\s*[=!]", selector), *groups)
            found[metric] |= set() if variable is None else {variable[2]}
    return found, groups


def expressions() -> Iterator[tuple[str, str, str]]:
    """Yield the place of each expression, the expression, and the text with labels that belongs to it."""
    for rule in RULES:
        yield rule["alert"], rule["expr"], " ".join(rule["annotations"].values())
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"], ""
            assert variable["query"]["query"] == variable["definition"]


def unknown(names: Names) -> list[str]:
    """Metrics and labels of the files that are not among the names."""
    found = []
    for place, expression, text in expressions():
        metrics, groups = asked(expression)
        assert metrics, place
        shown = set(re.findall(r"\{\{ ?(?:\$labels\.)?([a-z_]+)[ }]", text))
        found += [f"{place}: {metric}" for metric in metrics if metric not in names]
        # Without a grouping, the result has the labels of the metrics.
        found += [f"{place}: {label}" for group in groups for label in shown - group]
        for metric in metrics.keys() & names.keys():
            labels = metrics[metric] | (set() if groups else shown)
            found += [f"{place}: {metric}: {label}" for label in labels - names[metric] - OF_THE_SCRAPE]
    return found


@pytest.mark.process
@pytest.mark.long
def test_lanes_run_exports_every_metric_of_the_dashboard_and_of_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app.py").write_text(APP)
    address = free_address()
    _, run, target, *options = CONTAINER["command"]
    assert (run, options[:2]) == ("run", ["--http", "0.0.0.0:8080"])
    with running(tmp_path, target, "--http", address, *options[2:]) as service:
        service.until(lambda: blocked(str(get(address, "/metrics")[1])), "a blocked key")
        names = exported(get(address, "/metrics")[1])
        assert get(address, CONTAINER["livenessProbe"]["httpGet"]["path"])[0] == 200
        assert get(address, CONTAINER["readinessProbe"]["httpGet"]["path"])[0] == 200
        assert service.stop() == EXIT_DRAINED
    assert ONLY_AFTER_A_FAULT.isdisjoint(names)
    after_faults = {name: labels for name, labels in faulty(monkeypatch).items() if name in ONLY_AFTER_A_FAULT}
    assert after_faults.keys() == ONLY_AFTER_A_FAULT
    assert unknown({**names, **after_faults}) == []


def blocked(text: str) -> bool:
    """Whether the metrics show a blocked key."""
    return any(line.startswith("lanes_blocked{") and line.endswith(" 1.0") for line in text.splitlines())


def faulty(monkeypatch: pytest.MonkeyPatch) -> Names:
    """The metrics of a consumer that has met every fault."""
    registry = CollectorRegistry()
    meters = MeterProvider([PrometheusMetricReader(registry=registry)], shutdown_on_exit=False)
    use(monkeypatch, meters=meters)
    telemetry = Telemetry.create("billing", "kafka", status)
    assert telemetry is not None
    count_everything(telemetry, message())
    text = generate_latest(registry).decode()
    telemetry.close()
    meters.shutdown()
    return exported(text)


def test_a_wrong_metric_and_a_wrong_label_are_found() -> None:
    metrics, groups = asked('sum by (job, le) (rate(lanes_x_total{a="lanes_y", b!~"z"}[5m])) > 600 * lanes_z')
    assert metrics == {"lanes_x_total": {"a", "b", "job", "le"}, "lanes_z": {"job", "le"}}
    assert groups == [{"job", "le"}]
    assert asked("label_values(lanes_x, job)") == ({"lanes_x": {"job"}}, [])
    found = unknown({"lanes_blocked": {"worker"}})
    assert "LanesStuck: lanes_oldest_age_seconds" in found
    assert [line for line in found if line.startswith("LanesBlocked")] == [
        "LanesBlocked: lanes_blocked: lanes_consumer"
    ]


def test_the_rules_cover_the_faults_that_the_guide_lists() -> None:
    guide = (ROOT / "docs" / "guides" / "deploying.md").read_text()
    assert re.findall(r"^\| `(Lanes\w+)` \|", guide, re.MULTILINE) == [rule["alert"] for rule in RULES]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_the_probes_ask_the_port_that_the_command_opens_on_every_address() -> None:
    command = CONTAINER["command"]
    host, _, port = command[command.index("--http") + 1].rpartition(":")
    assert host == "0.0.0.0"
    probes = [CONTAINER[name]["httpGet"]["port"] for name in ("livenessProbe", "readinessProbe")]
    assert probes == [int(port)] * 2 == [each["containerPort"] for each in CONTAINER["ports"]] * 2
    template = DEPLOYMENT["spec"]["template"]["metadata"]
    assert template["annotations"]["prometheus.io/port"] == port
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= template["labels"].items()


def test_the_grace_period_exceeds_the_longest_drain_of_the_default_settings() -> None:
    assert POD["terminationGracePeriodSeconds"] > Settings().longest_drain
    said = f"is {Settings().longest_drain:g} "
    assert said in (ROOT / "docs" / "guides" / "deploying.md").read_text()
    assert f"which is {Settings().longest_drain:g} by default" in (FOLDER / "kubernetes.yml").read_text()


def test_each_figure_of_the_guide_is_one_of_the_page_performance() -> None:
    row = re.compile(r"^\| `?([^|`]+)`? \| ([\d.,]+) \| ([^|]+) \|", re.MULTILINE)
    measured = {case: (figure, unit) for case, figure, unit in row.findall((ROOT / "docs/performance.md").read_text())}
    guide = (ROOT / "docs" / "guides" / "deploying.md").read_text()
    quoted = re.findall(r"^\| `([^|`]+)` \| ([\d.,]+) \| ([^|]+) \|$", guide, re.MULTILINE)
    assert len(quoted) > 10
    assert [each for each in quoted if measured.get(each[0]) != each[1:]] == []
