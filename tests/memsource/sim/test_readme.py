"""The failure that ``memsource/README.md`` shows is what its test prints today."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from memsource.sim.errors import SimulationFailed, TokenRefused
from memsource.sim.plans.token import decode

README = Path(__file__).resolve().parents[3] / "memsource" / "README.md"
TOKEN = re.compile(r"lanes1-[A-Za-z0-9_-]+")


def test_the_failure_is_what_is_printed_today() -> None:
    text = README.read_text()
    (source,) = re.findall(r"```python\n((?:(?!```).)*?async def test_totals.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```text\n(\d+ found, .*?)\n```", text, re.DOTALL)
    definitions, call, _ = source.partition("\ntry:\n    test_totals()\n")
    assert call
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(definitions, README.name, "exec", dont_inherit=True), names)
    with pytest.raises(SimulationFailed) as raised:
        names["test_totals"]()
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
