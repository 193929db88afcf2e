"""The failures that the pages on the simulator show are the present output of their tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from memsource.sim.errors import SimulationFailed, TokenRefused
from memsource.sim.plans.token import decode

DOCS: Final = Path(__file__).resolve().parents[3] / "docs"
TOKEN: Final = re.compile(r"lanes1-[A-Za-z0-9_-]+")


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "file", "name"),
    [
        ("start/simulation.md", "test_stock.py", "test_stock"),
        ("guides/testing.md", "tests/test_totals.py", "test_totals"),
    ],
)
def test_the_failure_that_a_page_shows_is_printed_by_this_version(page: str, file: str, name: str) -> None:
    text = (DOCS / page).read_text()
    source = re.findall(rf"```python\n((?:(?!```).)*?async def {name}.*?)```", text, re.DOTALL)[0]
    (shown,) = re.findall(r"```text\n(findings on .*?)\n```", text, re.DOTALL)
    shown = re.sub(r"\n {6}(?=\S)", " ", shown)  # a line that is too long for a page goes on in the next one
    definitions, _, _ = source.partition(f"\ntry:\n    {name}()\n")
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(definitions, file, "exec", dont_inherit=True), names)
    with pytest.raises(SimulationFailed) as raised:
        names[name]()
    printed = str(raised.value)
    (token,) = set(TOKEN.findall(text))
    (today,) = TOKEN.findall(printed)
    assert shown.replace(token, today) == printed
    refused = ""
    try:
        decode(token)
    except TokenRefused as error:
        refused = str(error)
    # Another Python prints another token of the same plan.
    assert token == today or "was made by python '3." in refused
