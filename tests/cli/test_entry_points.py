"""Commands are entry points, which `lanes` imports when they run."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, packages_distributions
from importlib.util import find_spec
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lanes.cli.kit import MODULES
from tests.project.public_api import ROOT

PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS: Final = ("lanes.commands", "lanes.dead_letter_boxes", "lanes.queue_brokers")
EXTRAS: Final[dict[str, list[str]]] = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("group", GROUPS)
def test_the_installed_entry_points_are_those_of_the_project(group: str) -> None:
    assert {point.name: point.value for point in entry_points(group=group)} == PROJECT["entry-points"][group]


@pytest.mark.parametrize("group", GROUPS)
def test_every_entry_point_names_extras_of_the_project(group: str) -> None:
    for point in entry_points(group=group):
        assert set(point.extras) <= EXTRAS.keys(), point


@pytest.mark.parametrize("extra", MODULES)
def test_the_modules_of_an_extra_are_its_requirements(extra: str) -> None:
    homes = packages_distributions()
    wanted = {canonicalize_name(Requirement(one).name) for one in EXTRAS[extra]}
    for module in MODULES[extra]:
        assert find_spec(module) is not None
        assert {canonicalize_name(one) for one in homes[module]} <= wanted


@pytest.mark.process
@pytest.mark.process
def test_the_help_imports_no_command() -> None:
    """The help shows the text of every command, also of those in adapters."""
    code = """
import sys
from lanes.cli.app import main
sys.argv = ["lanes", "--help"]
try:
    main()
finally:
    loaded = {name.partition(".")[0] for name in sys.modules}
    print(sorted(loaded & {"lanes_jetstream", "lanes_kafka", "lanes_spark", "memsource", "pyarrow", "rich"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    assert last == "[]"
    shown = dict(line.split(maxsplit=1) for line in lines[lines.index("Commands:") + 1 :])
    names = {point.name for point in entry_points(group="lanes.commands") if "." not in point.name}
    assert names <= shown.keys()


@pytest.mark.process
def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "lanes", "rng"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("lanes: No such command") and "`lanes --help`" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("adapter", "module", "extra"),
    [
        ("lanes_kafka", "confluent_kafka", "kafka"),
        ("lanes_jetstream", "nats", "jetstream"),
        ("lanes_postgres", "psycopg", "postgres"),
        ("lanes_spark", "pyspark", "spark"),
    ],
)
def test_an_adapter_without_its_package_names_the_extra(adapter: str, module: str, extra: str) -> None:
    code = f"""
import sys
sys.modules[{module!r}] = None
try:
    import {adapter}
except ImportError as error:
    print(type(error).__name__, type(error.__cause__).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    remedy = f"pip install '.[{extra}]' in the checkout of lanes"
    assert done.stdout == f"ImportError ModuleNotFoundError {adapter} needs {module}: {remedy}\n"
