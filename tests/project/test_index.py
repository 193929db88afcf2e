"""``tests/README.md`` links every test file, with the first sentence of its docstring."""

from __future__ import annotations

from tests.project.index import PAGE, folders, page, summary


def test_the_index_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.project.index`"


def test_every_test_file_has_a_docstring_about_its_behaviour() -> None:
    assert [path for paths in folders().values() for path in paths if not summary(path)] == [], "add their docstrings"
