"""Fakes that several files use: an answer, and an admin client that describes topics."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from lanes_kafka.bridge import Answer


class FakeAnswer(Answer[None]):
    """An answer to a command, read in the same thread: ``given`` holds an error or None for each answer."""

    def __init__(self, given_up: bool = False) -> None:
        self.given_up = given_up
        self.given: list[Exception | None] = []

    def give(self, value: None) -> None:
        self.given.append(value)

    def fail(self, error: Exception) -> None:
        self.given.append(error)


class FakeAdmin:
    """An admin client that describes topics.

    ``topics`` maps a topic to its id, to the code of an error, or to None for a question that waits for ``answer``.

    Attributes:
        next: Replacements of ``topics``, one for each further question.
        asked: Number of questions.
        broken: Whether asking raises.
        waiting: Futures without an answer.
    """

    def __init__(self, **topics: str | int | None) -> None:
        self.topics: dict[str, str | int | None] = topics
        self.next: list[dict[str, str | int | None]] = []
        self.asked = 0
        self.broken = False
        self.waiting: list[Future[Any]] = []

    def poll(self, timeout: float) -> None:
        pass

    def describe_topics(self, names: Any, request_timeout: float) -> dict[str, Future[Any]]:
        self.asked += 1
        if self.broken:
            raise KafkaException(KafkaError(KafkaError._FATAL))
        if self.next:
            self.topics = self.next.pop(0)
        futures: dict[str, Future[Any]] = {name: Future() for name in self.topics}
        for name, described in self.topics.items():
            if described is None:
                self.waiting.append(futures[name])
            else:
                _give(futures[name], described)
        return futures

    def answer(self, described: str | int) -> None:
        """Answer all questions that wait, with an id or the code of an error."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            _give(future, described)


def _give(future: Future[Any], described: str | int) -> None:
    if isinstance(described, int):
        future.set_exception(KafkaException(KafkaError(described)))
    else:
        future.set_result(SimpleNamespace(topic_id=described or None, partitions=[0, 1]))
