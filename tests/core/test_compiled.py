"""The core can be compiled by mypyc, and then still does what its unit tests say. It happens in a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import lanes.core

CORE = Path(lanes.core.__file__).parent
TESTS = Path(__file__).parent

SETUP = """
from pathlib import Path

from mypyc.build import mypycify
from setuptools import setup

modules = sorted(str(path) for path in Path("lanes/core").glob("*.py") if path.name != "__init__.py")
setup(name="compiled", packages=[], ext_modules=mypycify(["--strict", *modules], opt_level="0"))
"""

# Nothing but the core and the errors is there, and a compiled module runs only where there is no other.
CONFTEST = """
from importlib import import_module
from pathlib import Path

from hypothesis import settings

settings.register_profile("lanes", deadline=None)
settings.load_profile("lanes")

for path in Path("lanes/core").glob("*.py"):
    if path.name != "__init__.py":
        file = import_module(f"lanes.core.{path.stem}").__file__
        assert file.endswith(SUFFIX), f"{file} is not compiled"
"""

CONFIG = """
[pytest]
addopts = --strict-markers --strict-config --import-mode=importlib
pythonpath = .
filterwarnings = error
"""

# They read sources, run for long, compile, or are about what is not compiled.
NOT_COPIED = (
    "test_purity.py",
    "test_engine_machine.py",
    "test_engine_modes_machine.py",
    "test_snapshot_machine.py",
    "twin.py",
    "test_compiled.py",
    "*cohort_*.py",
)

# mypyc checks the types of arguments itself, and says so in its own words.
NOT_RUN = ("test_types.py::test_a_key_of_another_type_is_refused_by_type",)


def missing() -> str | None:
    """What a compilation needs and this machine does not have, with the remedy."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"no C compiler {compiler!r}: install one (Debian: apt install gcc; macOS: xcode-select --install)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"no {header}: install Python's headers (Debian: apt install python3-dev)"
    return None


def run(folder: Path, *arguments: str) -> str:
    """Run Python in ``folder`` with nothing but that folder on its path; its output. Fails with the output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(300)  # half a minute, and a C compiler on a busy machine
def test_the_unit_tests_pass_against_the_compiled_core(tmp_path: Path) -> None:
    if (lacking := missing()) is not None:
        if os.environ.get("CI"):
            pytest.fail(lacking)
        pytest.skip(lacking)
    (tmp_path / "lanes").mkdir()
    (tmp_path / "lanes" / "__init__.py").touch()
    shutil.copy(CORE.parent / "errors.py", tmp_path / "lanes")  # what a message carries that could not be read
    shutil.copytree(CORE, tmp_path / "lanes" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    tests = tmp_path / "tests"
    shutil.copytree(TESTS, tests / "core", ignore=shutil.ignore_patterns("__pycache__", *NOT_COPIED))
    (tests / "__init__.py").touch()
    (tests / "conftest.py").write_text(CONFTEST.replace("SUFFIX", repr(EXTENSION_SUFFIXES[0])))
    (tmp_path / "pytest.ini").write_text(CONFIG)
    (tmp_path / "setup.py").write_text(SETUP)

    run(tmp_path, "-W", "ignore", "setup.py", "build_ext", "--inplace")
    deselected = [f"--deselect=tests/core/{test}" for test in NOT_RUN]
    output = run(tmp_path, "-m", "pytest", "tests/core", "-q", "--tb=short", "-p", "no:cacheprovider", *deselected)
    assert " passed" in output
    assert "skipped" not in output
