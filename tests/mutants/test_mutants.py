"""Every mutant can be planted: its old text is in the code, and the changed code compiles."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.mutants import Mutant, mutated
from tests.mutants.hunted import hunted
from tests.mutants.table_demo import MUTANTS

_PLANT = """
import importlib, sys
from tests.mutants import install
from tests.mutants.table_demo import MUTANTS
mutant = MUTANTS[sys.argv[1]]
install(mutant)
importlib.import_module(mutant.module)
try:
    install(mutant)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_old_text_of_each_mutant_occurs_once(mutant: Mutant) -> None:
    for each in (mutant, *mutant.also):
        spec = find_spec(each.module)
        assert spec is not None and spec.origin is not None
        source = mutated(Path(spec.origin).read_text(), each)
        assert each.new in source
        compile(source, spec.origin, "exec", dont_inherit=True)


def test_an_old_text_that_does_not_occur_once_is_refused() -> None:
    mutant = Mutant("gone", "lanes.core.engine", "no such line", "", "", "jetstream", ())
    with pytest.raises(ValueError, match=r"gone: its old text occurs 0 times in lanes\.core\.engine"):
        mutated("source", mutant)
    with pytest.raises(ValueError, match="2 times"):
        mutated("no such line, no such line", mutant)


def test_a_mutant_is_imported_and_only_before_the_module_itself() -> None:
    command = [sys.executable, "-c", _PLANT, "no_bound"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "mutant no_bound: lanes.core.flow is already imported; install the mutant before the import" in done.stdout


def test_a_failed_hunt_names_its_mutant_and_the_reason() -> None:
    with pytest.raises(RuntimeError, match=r"hunt ended with the status 1; not looked for: nobody\n(.*\n)+.*KeyError"):
        hunted(["nobody"])


def test_a_hunt_whose_process_dies_names_the_cause() -> None:
    script = (
        "import os, signal, sys\n"
        "from tests.mutants import hunt\n"
        "hunt.hunt = lambda name, ready: os.kill(os.getpid(), signal.SIGKILL if name == 'one' else signal.SIGSEGV)\n"
        "sys.exit(hunt.main(['one', 'two']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the hunt for the mutant one died of SIGKILL: something outside of it ended it" in done.stderr
    assert "the hunt for the mutant two died of SIGSEGV\n" in done.stderr
    assert "Fatal Python error: Segmentation fault" in done.stderr
