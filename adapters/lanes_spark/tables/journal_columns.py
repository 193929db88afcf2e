"""Whether a table is a journal, by the columns that are read of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lanes.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["check_kinds"]


def check_kinds(table: DataFrame, wanted: Mapping[str, str], named: str) -> None:
    """Raise ``ConfigError`` where a column is missing or of another type; ``named``: what the error begins with."""
    kinds = {field.name: field.dataType.simpleString() for field in table.schema}
    for name, kind in wanted.items():
        if kinds.get(name) != kind:
            found = f"of type {kinds[name]}" if name in kinds else "missing"
            raise ConfigError(
                f"{named}: its column {name}, of type {kind}, is {found}; pass what lanes.run(journal=…) has written, "
                "unchanged"
            )
