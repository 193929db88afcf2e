"""The core is pure, and no code of the engine or the runtime names a backend. The tests parse the sources."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lanes.core

CORE = Path(lanes.core.__file__).parent
LANES = CORE.parent
MODULES = sorted(
    ".".join(path.relative_to(CORE).with_suffix("").parts) for path in CORE.rglob("*.py") if path.stem != "__init__"
)

# Data structures and annotations. No module that waits, measures time, draws random numbers or does I/O.
ALLOWED = {"__future__", "bisect", "collections", "dataclasses", "heapq", "itertools", "operator", "typing"}

# Computation that one module needs, such as a checksum.
ALLOWED_TO_ONE = {
    "ring": {"blake3"},
    "queue_hash": {"blake3"},
    "offset_map": {"zlib"},
    "cohort.plan": {"fractions"},
    "cohort.records": {"functools", "json", "re"},
}

# This module imports no other module of the project.
ERRORS = "lanes.errors"


def file_of(module: str) -> str:
    """The path of a module, relative to the core."""
    return f"{module.replace('.', '/')}.py"


IMPURE_CALLS = {"open", "print", "input", "eval", "exec", "compile", "__import__", "breakpoint"}

BACKENDS = ("jetstream", "kafka", "nats")
# The command line, the remedies of refused arguments, and the attributes of OpenTelemetry that belong to one system.
MAY_NAME_BACKENDS = ("arguments.py", "cli/", "observe/otel.py")
NEUTRAL = [
    file
    for path in sorted(LANES.rglob("*.py"))
    if not (file := path.relative_to(LANES).as_posix()).startswith(MAY_NAME_BACKENDS)
]


def tree_of(path: Path) -> ast.Module:
    """Parse a source without garbage collection, because Python 3.11 fails if a finalizer runs during the parse."""
    gc.disable()
    try:
        return ast.parse(path.read_text(), str(path))
    finally:
        gc.enable()


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """The full names of imported modules; `from lanes.core import x` counts as `lanes.core.x`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the module has a relative import; make it absolute"
            assert node.module is not None
            if node.module in ("lanes.core", "lanes.core.cohort"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("module", MODULES)
def test_a_core_module_imports_data_structures_and_the_core(module: str) -> None:
    allowed = ALLOWED | ALLOWED_TO_ONE.get(module, set())
    foreign = {
        name
        for name in imports(ast.walk(tree_of(CORE / file_of(module))))
        if not name.startswith("lanes.core.") and name.partition(".")[0] not in allowed
    }
    assert foreign <= {ERRORS}


def test_the_errors_that_the_core_knows_import_only_the_standard_library() -> None:
    imported = {name.partition(".")[0] for name in imports(ast.walk(tree_of(LANES / "errors.py")))}
    assert imported == {"__future__", "collections", "difflib", "functools", "typing"}


def test_the_imports_that_the_core_may_use_are_in_the_standard_library() -> None:
    assert set(sys.stdlib_module_names) >= ALLOWED


@pytest.mark.parametrize("module", MODULES)
def test_a_core_module_has_no_async_code_and_no_io(module: str) -> None:
    impure = [
        f"{module}.py:{getattr(node, 'lineno', '?')}"
        for node in ast.walk(tree_of(CORE / file_of(module)))
        if isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await)
        or (isinstance(node, ast.comprehension) and node.is_async)
        or (isinstance(node, ast.Name) and node.id in IMPURE_CALLS)
    ]
    assert impure == []


def test_the_package_of_the_core_imports_nothing() -> None:
    # Otherwise every import of one part would load all parts.
    for package in (CORE, CORE / "cohort"):
        assert list(imports(ast.walk(tree_of(package / "__init__.py")))) == []


def code_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every identifier and string of the code with its line. A string that stands alone is documentation."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in documentation:
            yield line, node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                yield line, word


@pytest.mark.parametrize("file", NEUTRAL)
def test_the_code_of_engine_and_runtime_names_no_backend(file: str) -> None:
    named = [
        f"{file}:{line}: {word}"
        for line, word in code_words(tree_of(LANES / file))
        if any(backend in word.lower() for backend in BACKENDS)
    ]
    assert named == []


@pytest.mark.parametrize(
    "line",
    [
        "import nats.errors",
        "from lanes_jetstream import x",
        "from here import kafka as broker",
        "NatsServer()",
        "self.jetstream = 1",
        "call(kafka=1)",
        "def kafka(): ...",
        'log("no Kafka today")',
        'f"{x} of NATS"',
        'x = b"nats"',
    ],
)
def test_the_search_finds_the_name_of_a_backend_wherever_code_can_have_it(line: str) -> None:
    assert any(backend in word.lower() for _, word in code_words(ast.parse(line)) for backend in BACKENDS)


def test_the_search_ignores_the_name_of_a_backend_in_documentation() -> None:
    documented = '"""For Kafka."""\nX = 1\n"""As NATS has it."""'
    assert not any(backend in word.lower() for _, word in code_words(ast.parse(documented)) for backend in BACKENDS)
