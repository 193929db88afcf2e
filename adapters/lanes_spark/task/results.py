"""Collects the rows that handlers return.

At the settlement of a message, the return value of its handler becomes no row, one row or several rows. A new attempt
of the message replaces the value. A message that the consumer has given up has no row.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, cast

import pyarrow as pa  # type: ignore[import-untyped]

from lanes.core.types import Message, PartitionId
from lanes.errors import ConfigError, LanesError
from lanes.handlers import Handler, is_async, refuse_awaitable

COUNTS: Final = ("delivered", "finished", "dead_lettered")
"""Columns for the counts of a task. In all rows except the task's last row, these columns are null."""

_UNFIT: Final = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""Exceptions of Arrow for values of a wrong type."""

Result = tuple[PartitionId, int, Mapping[str, object]]
"""Partition and position of a message, and a row that its handler returned."""


def check_results(schema: object) -> None:
    """Raise ``ConfigError`` unless ``schema`` is None or a pyarrow schema of results."""
    if schema is None:
        return
    if not isinstance(schema, pa.Schema):
        raise ConfigError(
            f"results={schema!r} is not a pyarrow.Schema: write results=pyarrow.schema([(name, type), …])"
        )
    if not schema.names or len(set(schema.names)) < len(schema.names):
        raise ConfigError(f"results has the columns {schema.names}: give one or more columns with different names")


def output_schema(results: Any) -> Any:
    """Return the Arrow schema of a task's rows: its counts, and a struct ``result`` if the job has results."""
    fields = [pa.field(name, pa.int64()) for name in COUNTS]
    if results is not None:
        fields.append(pa.field("result", _row_type(results)))
    return pa.schema(fields)


class Returns:
    """Stores the values that handlers return, until the messages are settled.

    Handlers may run in threads. ``take`` removes the value of a message only after its handler has ended.
    """

    def __init__(self) -> None:
        self._values: dict[Message, object] = {}

    def recording(self, handler: Handler, *, batch: bool) -> Handler:
        """Wrap the handler. The object stores the handler's return values until their messages are settled."""
        values = self._values
        if is_async(handler):
            awaited = cast(Callable[[Any], Awaitable[object]], handler)
            if batch:

                async def recording_batch(messages: list[Message]) -> object:
                    self._forget(messages)
                    return self._outcomes(messages, await awaited(messages))

                return recording_batch

            async def recording_one(message: Message) -> None:
                values[message] = await awaited(message)

            return recording_one
        plain = cast(Callable[[Any], object], handler)
        if batch:

            def recording_plain_batch(messages: list[Message]) -> object:
                self._forget(messages)
                returned = plain(messages)
                # Return an awaitable unchanged, because the caller raises an error that names the handler.
                return returned if inspect.isawaitable(returned) else self._outcomes(messages, returned)

            return recording_plain_batch

        def recording_plain(message: Message) -> None:
            returned = plain(message)
            refuse_awaitable(handler, returned, message)
            values[message] = returned

        return recording_plain

    def take(self, messages: Sequence[Message]) -> list[Result]:
        """Remove and return the rows of these settled messages.

        A handler returns None for no row, a mapping for one row, and a list of mappings for several rows. Raises
        ``LanesError`` for any other return value.
        """
        results: list[Result] = []
        for message in messages:
            returned = self._values.pop(message, None)
            if returned is None:
                continue
            for row in returned if isinstance(returned, list) else [returned]:
                if not isinstance(row, Mapping):
                    raise LanesError(
                        f"the handler returned a {type(row).__name__} at {message.partition.id} position "
                        f"{message.position}: with results=… return None, a dict by column, or a list of dicts"
                    )
                results.append((message.partition.id, message.position, row))
        return results

    def _forget(self, messages: list[Message]) -> None:
        for message in messages:
            self._values.pop(message, None)

    def _outcomes(self, messages: list[Message], returned: object) -> object:
        """Store the values of a batch handler, and return the outcomes for ``lanes``."""
        if not isinstance(returned, list | tuple) or len(returned) != len(messages):
            return returned
        for message, one in zip(messages, returned, strict=True):
            if not isinstance(one, BaseException):
                self._values[message] = one
        return [one if isinstance(one, BaseException) else None for one in returned]


def rows_batch(schema: Any, results: Sequence[Result]) -> Any:
    """Return an Arrow batch of rows. Raises a ``LanesError`` that names the message of a row outside the schema."""
    rows = [_fitting(schema, result) for result in results]
    kind = _row_type(schema)
    try:
        column = pa.array(rows, type=kind)
    except _UNFIT:
        for result, row in zip(results, rows, strict=True):
            _check_values(schema, result, row)
        raise
    nothing = pa.nulls(len(rows), pa.int64())
    return pa.RecordBatch.from_arrays([*[nothing] * len(COUNTS), column], schema=output_schema(schema))


def _check_values(schema: Any, result: Result, row: Mapping[str, object]) -> None:
    for field in schema:
        value = row.get(field.name)
        try:
            pa.array([value], type=field.type)
        except _UNFIT:
            # Omit Arrow's text, because it contains the value, which is user data.
            why = f"the column {field.name!r} is {field.type}, and the value is a {type(value).__name__}"
            raise _misfit(result, why) from None


def summary_batch(schema: Any, counts: Mapping[str, int]) -> Any:
    """Return the last row of a task, with its counts by the names of ``COUNTS``."""
    columns = [pa.array([counts[name]], type=pa.int64()) for name in COUNTS]
    if schema is not None:
        columns.append(pa.nulls(1, _row_type(schema)))
    return pa.RecordBatch.from_arrays(columns, schema=output_schema(schema))


def _row_type(schema: Any) -> Any:
    return pa.struct(list(schema))


def _fitting(schema: Any, result: Result) -> Mapping[str, object]:
    row = result[2]
    # Arrow would drop an unknown column, and fill a missing column with null.
    strange = [name for name in row if name not in schema.names]
    if strange:
        raise _misfit(result, f"the row has the column {strange[0]!r}, which is not among {', '.join(schema.names)}")
    for field in schema:
        if not field.nullable and row.get(field.name) is None:
            raise _misfit(result, f"the column {field.name!r} is null or missing, but not nullable")
    return row


def _misfit(result: Result, why: str) -> LanesError:
    partition, position, _ = result
    return LanesError(
        f"the handler's row at {partition} position {position} does not fit results=…: {why}; correct the handler or "
        "the schema"
    )
