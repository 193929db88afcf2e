"""The files of the project agree with each other, and contain no machine path, registry or version cap."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.conftest import Spawn, first_line, is_free

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

# In pieces, so that this file does not contain the forbidden texts.
HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("repo1", "maven", "org"),
        ("repo", "maven", "apache", "org"),
        ("registry", "npmjs", "org"),
        ("proxy", "golang", "org"),
        ("static", "crates", "io"),
        ("index", "crates", "io"),
    )
]
PLACES = [f"/{name}/" for name in ("work", "root")]
BINARY = {".gz", ".parquet", ".png", ".zst"}


def project_files() -> Iterator[Path]:
    """Yield every file of the project, without the environment, caches and build results."""
    outside = {".git", ".venv", ".cache", "__pycache__", "build", "dist", "htmlcov"}
    outside |= {f".{tool}_cache" for tool in ("mypy", "pytest", "ruff")} | {".hypothesis", "lanes_runtime.egg-info"}
    for folder, folders, names in os.walk(ROOT):
        here = Path(folder)
        folders[:] = [name for name in folders if name not in outside and not (here / name / "pyvenv.cfg").exists()]
        yield from (here / name for name in names)


def lines_with(needles: Iterable[str]) -> list[str]:
    """Return each line that contains one of the texts, as `file:line: text`."""
    pattern = re.compile("|".join(map(re.escape, needles)))
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in project_files()
        if path.suffix not in BINARY and path.name != "uv.lock"
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def requirements() -> dict[str, list[Requirement]]:
    """Return all required packages, by the extra or group that requires them."""
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    asked = {"core": project["dependencies"], "build": PROJECT["build-system"]["requires"]}
    asked |= {f"extra {name}": wanted for name, wanted in project["optional-dependencies"].items()}
    asked |= {f"group {name}": wanted for name, wanted in groups.items()}
    return {who: [Requirement(one) for one in wanted if isinstance(one, str)] for who, wanted in asked.items()}


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # Without the variables that an outer make passes to an inner make.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_make_without_a_target_lists_the_targets_one_a_line() -> None:
    listed = make()
    assert (listed.returncode, listed.stderr) == (0, "")
    shown = {line.split()[1]: line.split(maxsplit=2)[2] for line in listed.stdout.splitlines()}
    assert {"run", "test", "check", "bench", "fuzz", "soak"} <= shown.keys()
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert shown.keys() == {name for name in phony[1].split() if not name.startswith("environment-")}


@pytest.mark.parametrize("target", ["run", "test", "check", "bench", "fuzz", "soak"])
def test_a_missing_python_prints_one_line(target: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    failed = make(target, "PYTHON=python-of-tomorrow", cwd=tmp_path)
    ours = [line for line in failed.stderr.splitlines() if not line.startswith("make")]
    assert failed.returncode == 2
    assert len(ours) == 1
    assert ours[0].startswith("lanes: needs Python 3.11 or newer, looked for: python-of-tomorrow.")
    assert "PYTHON=/path/to/python3" in ours[0]
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


def test_make_broker_prints_the_address_of_the_broker(spawn: Spawn) -> None:
    """`make broker` prints an export line for a shell, and the broker runs until a SIGTERM."""
    recipe = shlex.split(make("-n", "broker").stdout.splitlines()[-1])
    assert recipe[:2] == ["exec", ".venv/bin/python"]
    broker = spawn(*recipe[2:])
    export, _, url = first_line(broker).strip().partition("=")
    assert (export, is_free(port := int(url.rpartition(":")[2]))) == ("export NATS_URL", False)
    broker.terminate()
    assert broker.wait(timeout=20) == 128 + signal.SIGTERM
    assert is_free(port)
    broker = spawn(*recipe[2:])
    port = int(first_line(broker).strip().rpartition(":")[2])
    broker.send_signal(signal.SIGINT)
    assert broker.wait(timeout=20) == 0, "Ctrl+C is the usual end, and make would print an error"
    assert is_free(port)


def test_the_version_is_that_of_the_installed_package() -> None:
    assert PROJECT["project"]["version"] == importlib.metadata.version("lanes-runtime")


def test_the_changelog_has_the_version_or_says_unreleased() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" or headings[0] == PROJECT["project"]["version"]


def test_no_dependency_has_an_upper_cap() -> None:
    capped = [
        f"{who}: {wanted}"
        for who, all_wanted in requirements().items()
        for wanted in all_wanted
        if [specifier.operator for specifier in wanted.specifier] != [">="]
    ]
    assert capped == []


def test_the_core_depends_on_three_packages() -> None:
    assert {wanted.name for wanted in requirements()["core"]} == {"anyio", "blake3", "opentelemetry-api"}


def test_the_dev_group_holds_the_extras_that_tests_use() -> None:
    asked = {who: {str(one) for one in wanted} for who, wanted in requirements().items()}
    assert asked["extra cli"] | asked["extra jetstream"] | asked["extra testing"] <= asked["group dev"]
    for extra in ("kafka", "journal", "postgres", "spark", "uvloop", "web"):
        assert asked[f"extra {extra}"] <= asked["group dev"]


def test_each_typed_package_has_its_marker() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [package for package in packages if not (ROOT / package / "py.typed").is_file()] == []


def test_no_file_names_a_package_registry() -> None:
    assert lines_with(HOSTS) == []


def test_no_file_names_a_place_on_one_machine() -> None:
    assert lines_with(PLACES) == []


def test_every_script_is_executable() -> None:
    scripts = [path for path in project_files() if path.read_bytes()[:2] == b"#!"]
    assert ROOT / ".ci" / "run" in scripts
    assert [str(path) for path in scripts if not os.access(path, os.X_OK)] == []
