"""The core is pure, its parts know each other one way, and nothing around it names a backend: read off the sources."""

from __future__ import annotations

import ast
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

# Data structures and annotations: nothing that waits, measures time, draws lots, writes or looks outside.
ALLOWED = {"__future__", "bisect", "collections", "heapq", "typing"}

# Computation that one module needs: a hash, a checksum.
ALLOWED_TO_ONE = {
    "ring": {"blake3"},
    "offset_map": {"zlib"},
    "cohort.actions": {"dataclasses"},
    "cohort.records": {"dataclasses", "json", "re"},
}

# It imports nothing itself.
ERRORS = "lanes.errors"

# What a module may import of the core. A new module has to be entered here.
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "lane": {"types"},
    "ring": {"types"},
    "offset_map": set(),
    "ledgers": {"types", "lane"},
    "outbox": {"types", "lane"},
    "flow": {"types"},
    "effects": {"types", "policy"},
    "policy": {"types"},
    "chains": {"types", "lane", "ledgers", "policy", "ring"},
    "commits": {"types", "lane", "ledgers", "policy", "effects", "chains"},
    "ownership": {
        "types",
        "lane",
        "ledgers",
        "outbox",
        "flow",
        "effects",
        "policy",
        "chains",
        "commits",
    },
    "drain": {"types", "effects", "ownership"},
    "engine": {"types", "lane", "ledgers", "effects", "policy", "chains", "ownership"},
    "snapshot": {"types", "lane", "ledgers", "policy", "commits", "engine"},
    "cohort.plan": set(),
    "cohort.ledger": set(),
    "cohort.phases": set(),
    "cohort.held_lease": {"types"},
    "cohort.actions": {"cohort.ledger"},
    "cohort.records": {"cohort.ledger"},
    "cohort.lease_machine": {
        "types",
        "cohort.actions",
        "cohort.held_lease",
        "cohort.ledger",
        "cohort.phases",
        "cohort.records",
    },
}


def file_of(module: str) -> str:
    """Where a module of the core is, seen from the core."""
    return f"{module.replace('.', '/')}.py"


IMPURE_CALLS = {"open", "print", "input", "eval", "exec", "compile", "__import__", "breakpoint"}

BACKENDS = ("jetstream", "kafka", "nats")
# Commands; and the attributes that OpenTelemetry has for one system alone.
NAMES_BACKENDS = {"cli.py", "cohort_commands.py", "dead_letter_commands.py", "demo.py", "observe.py"}
NEUTRAL = [
    *(f"core/{file_of(module)}" for module in MODULES),
    *sorted(path.name for path in LANES.glob("*.py") if path.name not in NAMES_BACKENDS),
]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """The full names of the modules that are imported; `from lanes.core import x` counts as `lanes.core.x`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
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


def test_the_errors_that_the_core_knows_import_nothing() -> None:
    assert set(imports(ast.walk(tree_of(LANES / "errors.py")))) == {"__future__"}


def test_what_is_allowed_is_the_standard_library() -> None:
    assert set(sys.stdlib_module_names) >= ALLOWED


@pytest.mark.parametrize("module", MODULES)
def test_a_core_module_neither_waits_nor_looks_outside(module: str) -> None:
    impure = [
        f"{module}.py:{getattr(node, 'lineno', '?')}"
        for node in ast.walk(tree_of(CORE / file_of(module)))
        if isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await)
        or (isinstance(node, ast.comprehension) and node.is_async)
        or (isinstance(node, ast.Name) and node.id in IMPURE_CALLS)
    ]
    assert impure == []


def test_the_order_of_the_core_modules_is_written_down() -> None:
    assert sorted(MAY_IMPORT) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_of_the_core_point_one_way(module: str) -> None:
    imported = imports(ast.walk(tree_of(CORE / file_of(module))))
    found = {name.removeprefix("lanes.core.") for name in imported if name.startswith("lanes.core.")}
    assert found <= MAY_IMPORT[module]


def test_the_package_itself_imports_nothing() -> None:
    # Else importing one part would import all of them, whatever the order says.
    for package in (CORE, CORE / "cohort"):
        assert list(imports(ast.walk(tree_of(package / "__init__.py")))) == []


def code_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every identifier and string of the code with its line. Strings that stand alone are documentation."""
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
def test_a_backend_is_found_wherever_code_can_name_it(line: str) -> None:
    assert any(backend in word.lower() for _, word in code_words(ast.parse(line)) for backend in BACKENDS)


def test_documentation_may_name_a_backend() -> None:
    documented = '"""For Kafka."""\nX = 1\n"""As NATS has it."""'
    assert not any(backend in word.lower() for _, word in code_words(ast.parse(documented)) for backend in BACKENDS)
