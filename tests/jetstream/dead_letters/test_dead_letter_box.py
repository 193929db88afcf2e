"""The operator's view of a dead-letter subject: dead letters are listed, found, republished and deleted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import nats
import pytest
from nats.aio.client import Client
from nats.js.api import SubjectTransform

import lanes
from lanes.dead_letters.box import StoredDeadLetter
from lanes_jetstream import JetStreamDeadLetters, JetStreamSource, subject_token
from lanes_jetstream.cohort.settings import CohortStream
from lanes_jetstream.dead_letters.box import JetStreamDeadLetterBox
from lanes_jetstream.dead_letters.wire import dead_letter_headers
from tests.conftest import NatsFactory
from tests.fakes.dead_letters import dead_letter
from tests.jetstream.workload import Stream, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def dead(client: Client, stream: Stream) -> AsyncIterator[str]:
    name = f"{stream.name}dead"
    await client.jetstream().add_stream(name=name, subjects=[f"{name}.>"])
    yield f"{name}.x"
    await client.jetstream().delete_stream(name)


@contextlib.asynccontextmanager
async def opened(where: str, subject: str) -> AsyncIterator[JetStreamDeadLetterBox]:
    box = JetStreamDeadLetterBox(where, subject)
    await box.open()
    try:
        yield box
    finally:
        await box.aclose()


def dead_letter_of(stream: Stream, **changes: object) -> lanes.DeadLetter:
    """A dead letter of this source, whose only key is the key of the lane."""
    usual: dict[str, object] = {
        "source": stream.name,
        "subject": f"{stream.name}.a",
        "headers": (("color", b"red"),),
        "record_key": None,
    }
    return dead_letter(**usual | changes)


async def park(client: Client, subject: str, *letters: lanes.DeadLetter) -> None:
    target = JetStreamDeadLetters(client, subject)
    await target.open()
    for one in letters:
        await target.put(one)


async def stored(box: JetStreamDeadLetterBox, one: lanes.DeadLetter) -> StoredDeadLetter:
    found = (await box.find([one.id]))[one.id]
    assert isinstance(found, StoredDeadLetter)
    return found


async def test_dead_letters_are_listed_in_order_and_found_whole(stream: Stream, dead: str, client: Client) -> None:
    sent = [dead_letter_of(stream, key=b"%d" % number) for number in range(5)]
    sent.append(dead_letter_of(stream, headers=(), value=bytes(range(256)) * 3_000))
    await park(client, dead, *sent)
    # The box ignores other subjects of the stream.
    await park(client, dead.replace(".x", ".y"), dead_letter_of(stream))
    async with opened(stream.url, dead) as box:
        assert await box.ids(2) == [one.id for one in sent[:2]]
        assert await box.ids() == [one.id for one in sent]
        found = await box.find([one.id for one in sent] + ["f" * 32])
    letters = {one: item.dead_letter for one, item in found.items() if isinstance(item, StoredDeadLetter)}
    assert letters == {one.id: one for one in sent}


async def test_a_disposed_dead_letter_is_deleted(stream: Stream, dead: str, client: Client) -> None:
    first, second = dead_letter_of(stream), dead_letter_of(stream)
    await park(client, dead, first, second)
    async with opened(stream.url, dead) as box:
        found = await stored(box, first)
        await box.dispose(found, "replayed")
        await box.dispose(found, "replayed")
        assert await box.ids() == [second.id]
        assert await box.find([first.id]) == {}
    assert (await client.jetstream().stream_info(f"{stream.name}dead")).state.messages == 1


async def test_every_copy_of_a_dead_letter_is_deleted(stream: Stream, client: Client) -> None:
    name = f"{stream.name}copies"
    jetstream = client.jetstream()
    await jetstream.add_stream(name=name, subjects=[f"{name}.x"], duplicate_window=0.1)

    async def copied(one: lanes.DeadLetter) -> None:
        """Park the dead letter again, because the server drops equal copies only for a short time."""
        with anyio.fail_after(10):
            while (await jetstream.publish(f"{name}.x", one.value, headers=dead_letter_headers(one))).duplicate:
                await anyio.sleep(0.01)

    try:
        sent, other = dead_letter_of(stream), dead_letter_of(stream)
        for one in (sent, other, sent, sent):
            await copied(one)
        async with opened(stream.url, f"{name}.x") as box, opened(stream.url, f"{name}.x") as late:
            assert await box.ids() == [sent.id, other.id]
            # A copy that another client has deleted does no harm.
            await jetstream.delete_msg(name, 3)
            await box.dispose(await stored(box, sent), "dropped")
            assert await box.ids() == [other.id]
            assert await late.ids() == [other.id]
            # A copy that arrives later is listed again.
            await copied(sent)
            assert await box.ids() == [other.id, sent.id]
            await box.dispose(await stored(box, sent), "dropped")
            assert await box.find([sent.id]) == {}
        state = (await jetstream.stream_info(name)).state
        assert (state.messages, state.first_seq, state.last_seq) == (1, 2, 5)
    finally:
        await jetstream.delete_stream(name)


async def test_a_dead_letter_deleted_by_another_client_is_not_found(stream: Stream, dead: str, client: Client) -> None:
    sent = dead_letter_of(stream)
    await park(client, dead, sent)
    async with opened(stream.url, dead) as box, opened(stream.url, dead) as other:
        mine = await stored(box, sent)
        await other.dispose(await stored(other, sent), "dropped")
        assert await box.find([sent.id]) == {}
        await box.dispose(mine, "dropped")
        assert await box.ids() == []


async def test_a_dead_letter_is_republished_once(stream: Stream, dead: str, client: Client) -> None:
    headers = (("color", b"red"), ("Nats-Msg-Id", b"mine"), ("Nats-Expected-Stream", b"other"), ("Lanes-Error", b"x"))
    sent = dead_letter_of(stream, headers=headers, subject=f"{stream.name}.k_7")
    await park(client, dead, sent)
    async with opened(stream.url, dead) as box:
        found = await stored(box, sent)
        assert await box.publish(found) == f"{stream.name} sequence 1"
        # The server drops a retry, as after a lost answer.
        assert await box.publish(found) == f"{stream.name} sequence 1"
        assert await box.ids() == [sent.id]
    assert (await client.jetstream().stream_info(stream.name)).state.messages == 1
    message = await client.jetstream().get_msg(stream.name, 1)
    assert (message.subject, message.data) == (f"{stream.name}.k_7", sent.value)
    assert message.headers == {
        "color": "red",
        "Lanes-Error": "x",
        "Lanes-Dead-Letter": sent.id,
        "Nats-Msg-Id": f"{sent.id}-replayed",
    }


async def test_a_missing_origin_is_refused(stream: Stream, dead: str, client: Client) -> None:
    sent = dead_letter_of(stream, subject=f"{stream.name}gone.a")
    await park(client, dead, sent)
    async with opened(stream.url, dead) as box:
        with pytest.raises(
            lanes.SourceError, match=r"no stream captures .*gone\.a.*; publish the message yourself, then drop"
        ):
            await box.publish(await stored(box, sent))


async def test_a_dead_letter_cannot_send_an_api_request(stream: Stream, dead: str, client: Client) -> None:
    """Any client may write a dead letter, and the operator who republishes it may have more permissions."""
    sent = dead_letter_of(stream, subject=f"$JS.API.STREAM.DELETE.{stream.name}", value=b"")
    await park(client, dead, sent)
    async with opened(stream.url, dead) as box:
        with pytest.raises(lanes.SourceError, match="no stream captures"):
            await box.publish(await stored(box, sent))
    assert (await client.jetstream().stream_info(stream.name)).config.name == stream.name


async def test_other_messages_are_counted_and_kept(stream: Stream, dead: str, client: Client) -> None:
    sent = dead_letter_of(stream)
    await client.jetstream().publish(dead, b"anything")
    await park(client, dead, sent)
    async with opened(stream.url, dead) as box:
        assert await box.ids() == [sent.id]
        assert box.other_messages == 1


async def test_a_stream_that_denies_deletion_is_reported(stream: Stream, client: Client) -> None:
    name = f"{stream.name}kept"
    await client.jetstream().add_stream(name=name, subjects=[f"{name}.x"], deny_delete=True)
    try:
        sent = dead_letter_of(stream)
        await park(client, f"{name}.x", sent)
        async with opened(stream.url, f"{name}.x") as box:
            with pytest.raises(lanes.SourceError, match=r"cannot be deleted from .*; allow deletion") as refused:
                await box.dispose(await stored(box, sent), "dropped")
            assert not refused.value.retryable
            assert await box.ids() == [sent.id]
    finally:
        await client.jetstream().delete_stream(name)


async def test_a_missing_subject_is_refused(stream: Stream) -> None:
    with pytest.raises(lanes.ConfigError, match="no stream captures the dead-letter subject"):
        await JetStreamDeadLetterBox(stream.url, f"{stream.name}nowhere.x").open()


@pytest.mark.parametrize("kind", ["transform", "created", "copied"])
async def test_a_dead_letter_of_a_divided_stream_is_republished_to_the_subject_that_was_published(
    stream: Stream, dead: str, client: Client, kind: str
) -> None:
    """``transform`` is the stream that the guides of JetStream recommend; the cohort makes the others."""
    jetstream, name = client.jetstream(), f"{stream.name}divided"
    divide = CohortStream(subject=f"{name}.*", tokens=(1,), origin=f"{name}origin" if kind == "copied" else None)
    config = divide.config(name, 64)
    if kind == "copied":
        await jetstream.add_stream(name=f"{name}origin", subjects=[f"{name}.*"])
    elif kind == "transform":
        transform = {"src": f"{name}.*", "dest": f"{name}.{{{{partition(64,1)}}}}.{{{{wildcard(1)}}}}"}
        config = {"name": name, "subjects": [f"{name}.*"], "subject_transform": transform}
    answer = json.loads((await client.request(f"$JS.API.STREAM.CREATE.{name}", json.dumps(config).encode())).data)
    assert "error" not in answer, answer

    async def refuse(message: lanes.Message) -> None:
        raise lanes.Term("no such item")

    try:
        await jetstream.publish(f"{name}.ann", b"book")
        source = JetStreamSource(stream.url, stream=name, durable="w", key=subject_token(2))
        async with lanes.Consumer(source, refuse, dead_letters=JetStreamDeadLetters(stream.url, dead)) as consumer:
            await until(lambda: consumer.status().settled == 1)
        async with opened(stream.url, dead) as box:
            (one,) = await box.ids()
            found = (await box.find([one]))[one]
            assert isinstance(found, StoredDeadLetter)
            before = found.dead_letter.subject
            assert before.endswith(".ann") and before != f"{name}.ann"
            await box.publish(found)
        seen: list[lanes.Message] = []
        async with lanes.Consumer(
            JetStreamSource(stream.url, stream=name, durable="w", key=subject_token(2)), seen.append
        ) as consumer:
            await until(lambda: consumer.status().settled == 1)
        assert [(message.subject, message.value) for message in seen] == [(before, b"book")]
    finally:
        for each in (name, *([f"{name}origin"] if kind == "copied" else [])):
            await jetstream.delete_stream(each)


def copy_of(name: str, *transform: str, **more: object) -> dict[str, Any]:
    """The copy of a stream in the configuration of another stream, with a transform."""
    pairs = [dict(zip(("src", "dest"), transform, strict=True))] if transform else []
    return {"name": name, "subject_transforms": pairs, **more}


CHAINS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    # The streams that copy A; the consumer reads B.
    "a source": [("B", {"sources": [copy_of("A", "in.orders.*", "orders.{{partition(4,1)}}.{{wildcard(1)}}")]})],
    "a source and a transform": [
        (
            "B",
            {
                "sources": [copy_of("A", "in.orders.*", "mid.{{wildcard(1)}}")],
                "subject_transform": {"src": "mid.*", "dest": "orders.{{partition(4,1)}}.{{wildcard(1)}}"},
            },
        )
    ],
    "a source that loses a part": [("B", {"sources": [copy_of("A", "in.orders.*", "orders.all.of.them")]})],
    "a mirror": [("B", {"mirror": copy_of("A", "in.orders.*", "orders.{{partition(4,1)}}.{{wildcard(1)}}")})],
    "a mirror with a transform": [
        ("B", {"mirror": copy_of("A"), "subject_transform": {"src": "in.>", "dest": "out.>"}}),
    ],
    "two copies": [
        ("C", {"sources": [copy_of("A", "in.orders.*", "mid.{{wildcard(1)}}")]}),
        ("B", {"mirror": copy_of("C", "mid.*", "orders.{{partition(4,1)}}.{{wildcard(1)}}")}),
    ],
}


@pytest.mark.parametrize("chain", CHAINS)
async def test_the_transforms_of_several_streams_are_undone_for_a_replay(fresh_nats: NatsFactory, chain: str) -> None:
    server = fresh_nats()
    client = await nats.connect(server.url)
    jetstream = client.jetstream()
    await jetstream.add_stream(name="DEAD", subjects=["dead"])
    streams: list[tuple[str, dict[str, Any]]] = [
        (
            "A",
            {"subjects": ["orders.*"], "subject_transform": {"src": "orders.*", "dest": "in.orders.{{wildcard(1)}}"}},
        ),
        # The stream of another subject of the chain must not get the message.
        ("OTHER", {"subjects": ["mid.>", "in.orders.>", "orders.*.*"]}),
        *CHAINS[chain],
    ]
    for name, config in streams:
        text = json.dumps({"name": name, **config})
        answer = json.loads((await client.request(f"$JS.API.STREAM.CREATE.{name}", text.encode())).data)
        assert "error" not in answer, answer

    async def refuse(message: lanes.Message) -> None:
        raise lanes.Term("no such item")

    try:
        await jetstream.publish("orders.ann", b"book")
        source = JetStreamSource(server.url, stream="B", durable="w", key=None)
        async with lanes.Consumer(source, refuse, dead_letters=JetStreamDeadLetters(server.url, "dead")) as consumer:
            await until(lambda: consumer.status().settled == 1)
        async with opened(server.url, "dead") as box:
            (one,) = await box.ids()
            found = (await box.find([one]))[one]
            assert isinstance(found, StoredDeadLetter)
            assert await box.publish(found) == "A sequence 2"
        assert (await jetstream.get_msg("A", 2)).subject == "in.orders.ann"
    finally:
        await client.close()


async def test_a_copied_message_of_unknown_origin_is_refused(stream: Stream, dead: str, client: Client) -> None:
    jetstream, name = client.jetstream(), f"{stream.name}copies"
    copies = [f"{name}-a", f"{name}-b"]
    for copied in copies:
        await jetstream.add_stream(name=copied, subjects=[f"{copied}.*"])
    config = {"name": name, "sources": [copy_of(copied, f"{copied}.*", "both.{{wildcard(1)}}") for copied in copies]}
    far = {
        "name": f"{name}-far",
        "sources": [copy_of("FAR", external={"api": "$JS.far.API"}) | {"filter_subject": "far"}],
    }
    for each in (config, far):
        answer = json.loads(
            (await client.request(f"$JS.API.STREAM.CREATE.{each['name']}", json.dumps(each).encode())).data
        )
        assert "error" not in answer, answer
    try:
        async with opened(stream.url, dead) as box:
            # A dead letter that was too large has lost the header that names the copied stream.
            sent = dead_letter_of(stream, source=name, subject="both.x")
            await park(client, dead, sent)
            with pytest.raises(lanes.SourceError, match=rf"'{name}-a\.x' or '{name}-b\.x'; publish the message your"):
                await box.publish(await stored(box, sent))
            sent = dead_letter_of(stream, source=f"{name}-far", subject="far")
            await park(client, dead, sent)
            with pytest.raises(lanes.SourceError, match="copies stream 'FAR' of another account or domain; publish"):
                await box.publish(await stored(box, sent))
    finally:
        for made in (name, f"{name}-far", *copies):
            await jetstream.delete_stream(made)


async def test_a_transform_that_loses_a_part_of_the_subject_is_named(stream: Stream, dead: str, client: Client) -> None:
    name = f"{stream.name}lossy"
    transform = SubjectTransform(src=f"{name}.*.*", dest=f"{name}.x.{{{{wildcard(2)}}}}.stored")
    await client.jetstream().add_stream(name=name, subjects=[f"{name}.*.*"], subject_transform=transform)
    try:
        sent = dead_letter_of(stream, source=name, subject=f"{name}.x.b.stored")
        await park(client, dead, sent)
        async with opened(stream.url, dead) as box:
            with pytest.raises(
                lanes.SourceError, match=rf"no stream captures .*transform '{name}\.\*\.\*' -> .*undone"
            ):
                await box.publish(await stored(box, sent))
    finally:
        await client.jetstream().delete_stream(name)
