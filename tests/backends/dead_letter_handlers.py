"""Handlers and decoders that the commands of the tests name; ``SEEN`` holds the handled messages in order."""

from __future__ import annotations

from typing import Any

import lanes

SEEN: list[tuple[int, bytes | None, bytes, object]] = []


async def remember(message: lanes.Message) -> None:
    SEEN.append((message.position, message.key, message.value, getattr(message, "data", None)))


def remember_too(message: lanes.Message) -> None:
    SEEN.append((message.position, message.key, message.value, getattr(message, "data", None)))


def remember_data(message: lanes.Message) -> None:
    SEEN.append((message.position, message.key, message.value, message.data))


async def remember_data_soon(message: lanes.Message) -> None:
    remember_data(message)


class Attributes:
    data: object


def other_data(message: lanes.Message) -> object:
    return Attributes().data


def refuse(message: lanes.Message) -> None:
    SEEN.append((message.position, message.key, message.value, None))
    raise ValueError("still no such customer \x1b[2J")


def first_word(message: lanes.Message) -> object:
    return message.value.split()[0].decode()


def wrong(message: lanes.Message) -> object:
    return remember(message)


def remember_all(messages: list[lanes.Message]) -> None:
    SEEN.extend((message.position, message.key, message.value, None) for message in messages)


def remember_each(messages: Any) -> None:
    for message in messages:
        remember_too(message)


def with_database(message: lanes.Message, database: str) -> None:
    remember_too(message)


NOT_A_FUNCTION = 5
