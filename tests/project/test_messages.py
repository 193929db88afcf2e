"""``tests/project/messages.txt`` lists every error and warning of the product."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.project import messages, source_names
from tests.project.messages import FILE, Reader, main
from tests.project.public_api import ROOT, module_of, modules

LOGGED = r"_?log\.(warning|error|exception|critical|log)\("


def test_the_list_is_compared_by_make_check() -> None:
    """The comparison takes seconds, too long for a fast test, but a changed text must be noticed before the commit."""
    makefile = (ROOT / "Makefile").read_text()
    check = makefile[makefile.index("\ncheck:") :].partition("\n\n")[0]
    assert "\t.venv/bin/python -m tests.project.messages compare\n" in check


def test_a_list_that_differs_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(messages, "FILE", tmp_path / "messages.txt")
    monkeypatch.setattr(messages, "listed", lambda: "one\ntwo\n")
    messages.FILE.write_text("one\ntwo\n")
    assert (main(["compare"]), *capsys.readouterr()) == (0, "", "")
    messages.FILE.write_text("one\nthree\n")
    assert main(["compare"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("Texts of the product have changed. ")
    assert said.endswith(" one\n-three\n+two\n \n")
    assert (main(["check"]), capsys.readouterr().err) == (2, "usage: python -m tests.project.messages [compare]\n")
    assert messages.FILE.read_text() == "one\nthree\n"


# --- the reader


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("def f(a): raise ValueError(f'a={a!r}: must be 1')", "f\n    ValueError: a={a!r}: must be 1"),
        ("def f(a): return ValueError('a ' + a)", "f\n    ValueError: a {a}"),
        ("class E(OSError): ...\ndef f(): raise E", "f\n    E: (no text)"),
        ("class E(OSError): ...\ndef f(a): raise E(a, retryable=True)", "f\n    E: {a}  [retryable=True]"),
        (
            "class E(OSError):\n  def __init__(self, a): super().__init__(f'no {a} here')",
            "E.__init__\n    E: no {a} here",
        ),
        ("log.warning('%s: %d left', a.b, c)", "the module itself\n    WARNING: {a.b}: {c} left"),
        ("log.log(level, 'left %s', a)", "the module itself\n    LOG level: left {a}"),
        ("warnings.warn('it is old', stacklevel=2)", "the module itself\n    WARN: it is old"),
        ("print(f'lanes: {a}', file=sys.stderr)", "the module itself\n    STDERR: lanes: {a}"),
        ("Check('a', False, 'b c', d)", "the module itself\n    Check: a | False | b c | {d}"),
        (
            "def f(a):\n  b = 'one of two' if a else 'two of two'\n  raise ValueError(f'{b}!')",
            "f\n    ValueError: {b}!\n          b = «one of two» if a else «two of two»",
        ),
        ("A = 'to be mended'\nraise OSError(A)", "the module itself\n    OSError: {A}\n          A = to be mended"),
        (
            "A = {1: 'one remedy', 2: 'another remedy'}\nraise OSError(A[b])",
            "the module itself\n    OSError: {A[b]}\n          A[1] = one remedy\n          A[2] = another remedy",
        ),
        (
            "def g() -> str: return 'from a helper'\ndef f(): raise OSError(g())",
            "f\n    OSError: {g()}\n  g\n    returns: from a helper",
        ),
        (
            "def f(what: str): raise OSError(f'{what}!')\ndef g(): f('from a caller')",
            "f\n    OSError: {what}!\n  g\n    for f(what): from a caller",
        ),
        (
            "class C:\n  def f(self, what: str): log.error('%s!', what)\n  def g(self): self.f(what='from a caller')",
            "C.f\n    ERROR: {what}!\n  C.g\n    for f(what): from a caller",
        ),
        (
            """\
class C:
  def f(self, what: str): log.error('%s!', what)
class D:
  def f(self): ...
  @classmethod
  def g(cls): return cls('for a constructor')""",
            "C.f\n    ERROR: {what}!",
        ),
        ("def f(refuse): raise refuse('made by a parameter')", "f\n    refuse: made by a parameter"),
    ],
)
def test_every_form_of_a_text_is_listed(text: str, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of("example", text)
    monkeypatch.setattr(messages, "ALSO", ())
    monkeypatch.setattr(messages, "COLLECTED", ())
    monkeypatch.setattr(source_names, "read", lambda name: module)
    monkeypatch.setattr(source_names, "modules", lambda: ("example",))
    # The caches of the project's own modules stay as they are.
    for name in ("source", "defined", "methods", "calls", "is_error"):
        fresh = cache(getattr(source_names, name).__wrapped__)
        for place in (source_names, messages):
            monkeypatch.setattr(place, name, fresh)
    assert Reader(["example"]).text() == f"{messages.HEAD.rstrip()}\n\n[example]\n  {entry}\n"


@pytest.mark.slow
def test_every_literal_of_a_raise_or_log_statement_is_listed() -> None:
    """The test searches in a different manner than the program: for each literal in a raise or log statement."""
    said = " ".join(FILE.read_text().split())
    lost, looked_for = [], 0
    for name in modules():
        for node in ast.walk(source_names.source(name).tree):
            logged = isinstance(node, ast.Call) and re.match(LOGGED, ast.unparse(node.func) + "(")
            if not logged and not isinstance(node, ast.Raise):
                continue
            for one in ast.walk(node):
                if isinstance(one, ast.Constant) and isinstance(one.value, str) and messages.prose(one.value):
                    pieces = re.split(r"%[-+#0-9.]*[a-zA-Z]|\n", one.value)
                    looked_for += len(pieces)
                    lost += [f"{name}: {piece}" for piece in pieces if " ".join(piece.split()) not in said]
    assert lost == []
    assert looked_for > 1000
