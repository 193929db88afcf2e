"""``PullConsumer`` agrees with a naive model, which keeps all former states and scans every message."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsource.jetstream.pull_consumer import ConsumerSettings, PullConsumer
from memsource.memory.topic import Topic

SIZE = 1 << 20


@dataclass
class Naive:
    """``books``: the state of each message on disk: deliveries and their time, or the acknowledgement."""

    settings: ConsumerSettings
    published: list[int] = field(default_factory=list)
    books: dict[int, tuple[int, float | str]] = field(default_factory=dict)
    queue: list[int] = field(default_factory=list)
    timer: float = math.inf
    kept: list[tuple[float, dict[int, tuple[int, float | str]]]] = field(default_factory=list)

    def pending(self) -> list[int]:
        return sorted(each for each, (_, since) in self.books.items() if not isinstance(since, str))

    def keep(self, now: float) -> None:
        self.kept.append((now, copy.deepcopy(self.books)))

    def pull(self, count: int, now: float) -> list[tuple[int, int]]:
        came: list[tuple[int, int]] = []
        while len(came) < count:
            if self.queue:
                one = self.queue.pop(0)
                times = self.books[one][0] + 1
                if self.settings.max_deliver is not None and times > self.settings.max_deliver:
                    self.books[one] = (times - 1, "dropped")
                    continue
            else:
                new = [each for each in self.published if each not in self.books]
                bound = self.settings.max_ack_pending
                if not new or (bound is not None and len(self.pending()) >= bound):
                    break
                one, times = new[0], 1
            self.books[one] = (times, now)
            self.timer = min(self.timer, now + self.settings.wait(times - 1) + 0.001)
            came.append((one, times))
        self.keep(now)
        return came

    def ack(self, one: int, now: float) -> None:
        if one in self.pending():
            self.books[one] = (1, "acked")
            self.queue = [each for each in self.queue if each != one]
            self.keep(now)

    def extend(self, one: int, now: float) -> None:
        if one in self.pending():
            self.books[one] = (self.books[one][0], now)
            self.keep(now)

    def nak(self, one: int, now: float, delay: float) -> None:
        if one in self.pending():
            if delay:
                self.books[one] = (self.books[one][0], now - self.settings.ack_wait + delay)
                self.timer = now + 0.01
                self.keep(now)
            elif one not in self.queue:
                self.queue.append(one)

    def set_ack_wait(self, seconds: float, now: float) -> None:
        if seconds != self.settings.ack_wait and self.pending():
            self.timer = now + 0.1
        self.settings = replace(self.settings, ack_wait=seconds)

    def reset(self, now: float) -> None:
        pending = self.pending()
        self.queue, self.timer = [], math.inf
        if pending:
            self.books = {each: state for each, state in self.books.items() if each < pending[0]}
        self.keep(now)

    def kill(self, now: float) -> None:
        written = [books for at, books in self.kept if at <= now - 0.1]
        self.books = copy.deepcopy(written[-1]) if written else {}
        for one in self.pending():
            times, since = self.books[one]
            assert not isinstance(since, str)
            self.books[one] = (times, math.floor(since))
        self.queue = []
        self.timer = now + min(self.settings.ack_wait + 0.001, 1.0) if self.pending() else math.inf
        # The state was read from the disk, so it is on the disk.
        self.kept = [(-math.inf, copy.deepcopy(self.books))]

    def advance(self, now: float) -> None:
        while self.timer <= now:
            at, self.timer = self.timer, math.inf
            for one in self.pending():
                times, since = self.books[one]
                assert not isinstance(since, str)
                due = since + self.settings.wait(times - 1)
                if one in self.queue:
                    continue
                if due > at:
                    self.timer = min(self.timer, due)
                elif self.settings.max_deliver is not None and times >= self.settings.max_deliver:
                    self.books[one] = (times, "dropped")
                    self.keep(at)
                else:
                    self.queue.append(one)


ONE = st.integers(1, 9)
SECONDS = st.sampled_from([0.05, 0.1, 0.25, 0.5, 1.0, 2.5])
STEPS = st.one_of(
    st.tuples(st.just("publish")),
    st.tuples(st.just("pull"), st.integers(1, 5)),
    st.tuples(st.just("ack"), ONE),
    st.tuples(st.just("extend"), ONE),
    st.tuples(st.just("nak"), ONE, st.sampled_from([0.0, 0.0, 0.25])),
    st.tuples(st.just("wait"), SECONDS),
    st.tuples(st.just("set_ack_wait"), SECONDS),
    st.tuples(st.just("reset")),
    st.tuples(st.just("kill")),
)
SETTINGS = st.builds(
    ConsumerSettings,
    ack_wait=st.sampled_from([0.5, 1.0]),
    backoff=st.sampled_from([(), (0.25, 1.0)]),
    max_deliver=st.sampled_from([None, 1, 2]),
    max_ack_pending=st.sampled_from([None, 1, 3]),
)


@given(SETTINGS, st.lists(STEPS, max_size=40))
def test_the_consumer_delivers_as_the_naive_model_does(settings: ConsumerSettings, steps: list[Any]) -> None:
    topic = Topic(1, "topic")
    topic.skip(1)
    consumer, naive, now = PullConsumer(topic.log(0), settings), Naive(settings), 0.0
    for step, *arguments in steps:
        if step == "publish":
            naive.published.append(topic.publish().position)
        elif step == "wait":
            now += arguments[0]
            consumer.advance(now)
            naive.advance(now)
        elif step == "pull":
            came = [(each.record.position, each.count) for each in consumer.pull(arguments[0], SIZE, now)]
            assert came == naive.pull(arguments[0], now)
        elif step == "nak":
            consumer.nak(arguments[0], now, arguments[1])
            naive.nak(arguments[0], now, arguments[1])
        elif step == "set_ack_wait":
            consumer.configure(replace(consumer.settings, ack_wait=arguments[0]), now)
            naive.set_ack_wait(arguments[0], now)
        else:
            getattr(consumer, step)(*arguments, now)
            getattr(naive, step)(*arguments, now)
        assert consumer.unacknowledged == naive.pending()
        assert consumer.dropped == [each for each, (_, since) in sorted(naive.books.items()) if since == "dropped"]
        over = [each for each, (_, since) in naive.books.items() if since == "acked"]
        assert consumer.unfinished == [each for each in naive.published if each not in over]
        assert consumer.waiting == len(naive.queue) + sum(each not in naive.books for each in naive.published)
        assert consumer.next_at() == naive.timer


def filled(count: int, **settings: Any) -> PullConsumer:
    topic = Topic(1, "topic")
    topic.skip(1)
    for _ in range(count):
        topic.publish(b"12345")
    return PullConsumer(topic.log(0), ConsumerSettings(**settings))


def pulled(consumer: PullConsumer, now: float, messages: int = 100, size: int = SIZE) -> list[tuple[int, int]]:
    return [(each.record.position, each.count) for each in consumer.pull(messages, size, now)]


def test_the_message_that_reaches_the_size_is_the_last() -> None:
    consumer = filled(4)
    assert [pulled(consumer, 0.0, size=size) for size in (0, 1, 6)] == [[], [(1, 1)], [(2, 1), (3, 1)]]
    assert repr(consumer) == "<PullConsumer: 3 unacknowledged, 0 to redeliver>"


def test_a_killed_server_forgets_changes_after_its_last_write() -> None:
    consumer = filled(6)
    pulled(consumer, 0.0, 3)
    consumer.ack(1, 0.0)
    consumer.ack(2, 0.95)
    pulled(consumer, 0.95, 2)
    consumer.kill(1.0)
    # The server forgot the acknowledgement of 2 and the deliveries of 4 and 5, so all three are new.
    assert consumer.unacknowledged == [2, 3]
    assert pulled(consumer, 1.0) == [(4, 1), (5, 1), (6, 1)]
    # Acknowledgements of forgotten deliveries do not count either.
    consumer.kill(1.0)
    consumer.ack(5, 1.0)
    assert consumer.unfinished == [2, 3, 4, 5, 6]


def test_a_killed_server_keeps_changes_before_its_last_write() -> None:
    consumer = filled(2)
    pulled(consumer, 0.85, 1)
    consumer.kill(1.0)
    assert consumer.unacknowledged == [1]


def test_a_reset_redelivers_messages_dropped_above_the_floor() -> None:
    consumer = filled(3, max_deliver=1)
    pulled(consumer, 0.0)
    consumer.nak(2, 0.0)
    assert pulled(consumer, 0.0) == []
    assert consumer.dropped == [2]
    consumer.reset(0.0)
    assert (consumer.dropped, pulled(consumer, 0.0)) == ([], [(1, 1), (2, 1), (3, 1)])


def test_every_delivery_has_a_token_of_its_own() -> None:
    consumer = filled(3)
    first = consumer.pull(3, SIZE, 0.0)
    consumer.nak(2, 0.0)
    (again,) = consumer.pull(3, SIZE, 0.0)
    assert [each.token for each in [*first, again]] == [1, 2, 3, 4]


def test_an_acknowledgement_can_be_lost_afterwards() -> None:
    consumer = filled(3)
    assert not consumer.lose_ack(1, 0.0)
    pulled(consumer, 0.0, 2)
    known = [consumer.last_acked]
    consumer.ack(1, 0.0)
    known.append(consumer.last_acked)
    assert consumer.lose_ack(1, 0.0)
    known.append(consumer.last_acked)
    assert known == [None, 1, None]
    assert consumer.lose_ack(2, 0.0)
    assert not consumer.lose_ack(2, 0.0)
    assert pulled(consumer, 0.0)[:2] == [(1, 2), (2, 2)]


def test_the_next_owner_restores_a_shrunk_ack_wait() -> None:
    consumer = filled(2, ack_wait=30.0, backoff=(20.0, 40.0))
    before = consumer.settings
    pulled(consumer, 0.0)
    consumer.shrink(0.001, 1.0)
    consumer.shrink(0.001, 2.0)
    assert consumer.settings.wait(1) == 0.001
    consumer.advance(2.1)
    assert consumer.waiting == 2
    consumer.restore(2.2)
    assert consumer.settings == before
    consumer.configure(replace(before, max_ack_pending=7), 2.3)
    consumer.restore(2.4)
    assert consumer.settings.max_ack_pending == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ack_wait": 0}, "ack_wait=0, backoff=\\(\\): must be more than 0 seconds"),
        ({"backoff": (1.0, 0.0)}, "backoff=\\(1.0, 0.0\\): must be more than 0 seconds"),
        ({"max_deliver": 0}, "max_deliver=0: must be 1 or more, or None"),
        ({"max_ack_pending": 0}, "max_ack_pending=0: must be 1 or more, or None"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConsumerSettings(**arguments)
