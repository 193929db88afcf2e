"""Scripts of requests to a nats-server, for the simulated server and for a real server.

A script receives a connected client and an unused name of a stream, and returns its observations. Times, sizes and the
text of an error are no observations.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

Seen = list[Any]
Script = Callable[[Client, str], Awaitable[Seen]]

SCRIPTS: Final[list[Script]] = []

_SECOND: Final = 1_000_000_000
_WAIT: Final = 30.0


def _script(script: Script) -> Script:
    SCRIPTS.append(script)
    return script


async def _api(client: Client, request: str, fields: object = None) -> dict[str, Any]:
    body = b"" if fields is None else json.dumps(fields).encode()
    answer: dict[str, Any] = json.loads((await client.request(f"$JS.API.{request}", body, timeout=_WAIT)).data)
    return answer


async def _code(client: Client, request: str, fields: object = None) -> object:
    """The HTTP status and the code of a refusal; None = the server accepted the request."""
    refusal = (await _api(client, request, fields)).get("error")
    return None if refusal is None else (refusal["code"], refusal["err_code"])


async def _stream(client: Client, name: str, **config: object) -> None:
    await _api(client, f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], **config})


def _consumer(name: str, **config: object) -> dict[str, Any]:
    return {"name": name, "durable_name": name, "ack_policy": "explicit", "ack_wait": 30 * _SECOND, **config}


async def _create(client: Client, stream: str, config: dict[str, Any], action: str = "create") -> object:
    fields = {"stream_name": stream, "config": config, "action": action}
    return await _code(client, f"CONSUMER.CREATE.{stream}.{config['name']}", fields)


async def _publish(client: Client, *subjects: str) -> None:
    for subject in subjects:
        await client.request(subject, b"x", timeout=_WAIT)


class _Inbox:
    """An inbox, and the messages and statuses that it has received."""

    def __init__(self, client: Client) -> None:
        self.subject = client.new_inbox()
        self.messages: list[Msg] = []
        self.seen: Seen = []
        self._client = client
        self._arrived = asyncio.Event()

    async def open(self) -> None:
        async def receive(message: Msg) -> None:
            self._note(message)
            self._arrived.set()

        self._subscription = await self._client.subscribe(f"{self.subject}.*", cb=receive)

    async def close(self) -> None:
        await self._subscription.unsubscribe()
        await self._client.flush()

    def _note(self, message: Msg) -> None:
        headers = dict(message.headers or {})
        if "Status" not in headers:
            self.messages.append(message)
            words = message.reply.split(".")
            # The number of deliveries, the sequence, the delivery and the number of pending messages.
            self.seen.append((message.subject.rpartition(".")[2], *map(int, [*words[4:7], words[8]])))
            return
        # The server counts bytes of its own in the pending bytes.
        headers.pop("Nats-Pending-Bytes", None)
        if headers["Status"] == "503":
            # Newer servers name the subject that nobody serves.
            headers = {"Status": "503"}
        self.seen.append((message.subject.rpartition(".")[2], sorted(headers.items())))

    async def pull(self, stream: str, consumer: str, reply: str = "1", **fields: int) -> None:
        request = {"expires": 20 * _SECOND, **fields}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        await self._client.publish(subject, json.dumps(request).encode(), reply=f"{self.subject}.{reply}")
        await self._client.flush()

    async def until(self, count: int) -> None:
        """Wait for this number of messages and statuses."""
        async with asyncio.timeout(_WAIT):
            while len(self.seen) < count:
                self._arrived.clear()
                await self._arrived.wait()


async def _inbox(client: Client) -> _Inbox:
    inbox = _Inbox(client)
    await inbox.open()
    return inbox


async def _waiting(client: Client, stream: str, count: int) -> None:
    """Wait until the server has read this number of pull requests.

    The server reads pull requests concurrently with later requests.
    """
    async with asyncio.timeout(_WAIT):
        read = 0
        while read < count:
            read = (await _api(client, f"CONSUMER.INFO.{stream}.c"))["num_waiting"]


# --- pull requests


@_script
async def a_request_ends_with_its_time(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _create(client, name, _consumer("c"))
    await _publish(client, f"{name}.a")
    inbox = await _inbox(client)
    await inbox.pull(name, "c", batch=3, expires=_SECOND // 2)
    await inbox.until(2)
    return inbox.seen


@_script
async def a_request_with_a_limit_of_bytes_reports_its_end(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _create(client, name, _consumer("c"))
    await _publish(client, f"{name}.a", f"{name}.b")
    inbox = await _inbox(client)
    await inbox.pull(name, "c", "1", batch=1, max_bytes=10_000)
    await inbox.until(2)
    await inbox.pull(name, "c", "2", batch=1)
    await inbox.until(3)
    return inbox.seen


@_script
async def a_waiting_request_has_heartbeats(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _create(client, name, _consumer("c"))
    await _publish(client, f"{name}.a")
    inbox = await _inbox(client)
    await inbox.pull(name, "c", batch=2, expires=3 * _SECOND, idle_heartbeat=_SECOND)
    await inbox.until(2)
    return inbox.seen[:2]


@_script
async def requests_take_turns(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _create(client, name, _consumer("c"))
    first, second = await _inbox(client), await _inbox(client)
    await first.pull(name, "c", batch=2)
    await second.pull(name, "c", batch=3)
    await _waiting(client, name, 2)
    for inbox, count in ((first, 1), (second, 1), (first, 2), (second, 2), (second, 3)):
        # The server stores and delivers concurrently, so a later message could count as pending.
        await _publish(client, f"{name}.a")
        await inbox.until(count)
    return [first.seen, second.seen]


@_script
async def a_deleted_consumer_ends_its_requests(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _create(client, name, _consumer("c"))
    inbox = await _inbox(client)
    await inbox.pull(name, "c", batch=2)
    await _waiting(client, name, 1)
    await _api(client, f"CONSUMER.DELETE.{name}.c")
    await inbox.until(1)
    await inbox.pull(name, "c", "2", batch=2)
    await inbox.until(2)
    return inbox.seen


@_script
async def a_request_without_a_subscription_takes_no_message(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _create(client, name, _consumer("c"))
    first = await _inbox(client)
    await first.pull(name, "c", batch=2)
    await _waiting(client, name, 1)
    await first.close()
    await _publish(client, f"{name}.a")
    second = await _inbox(client)
    await second.pull(name, "c", "2", batch=1)
    await second.until(1)
    return [first.seen, second.seen]


# --- acknowledgements


@_script
async def an_acknowledgement_is_confirmed(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _create(client, name, _consumer("c"))
    await _publish(client, f"{name}.a")
    inbox = await _inbox(client)
    await inbox.pull(name, "c", batch=1)
    await inbox.until(1)
    reply = inbox.messages[0].reply
    bodies = (b"+WPI", b"+ACK", b"+ACK")
    seen: Seen = [(await client.request(reply, body, timeout=_WAIT)).data for body in bodies]
    await _api(client, f"CONSUMER.DELETE.{name}.c")
    try:
        await client.request(reply, b"+ACK", timeout=_WAIT)
    except nats.errors.NoRespondersError:
        seen.append("no responders")
    return seen


@_script
async def the_description_of_a_consumer_counts(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _create(client, name, _consumer("c", filter_subject=f"{name}.a"))
    await _publish(client, *(f"{name}.{each}" for each in "abaaba"))
    inbox = await _inbox(client)
    seen: Seen = [await _counts(client, name)]
    await inbox.pull(name, "c", batch=3)
    await inbox.until(3)
    seen.append(await _counts(client, name))
    for number in (1, 0):
        await client.request(inbox.messages[number].reply, b"+ACK", timeout=_WAIT)
        seen.append(await _counts(client, name))
    return [inbox.seen, seen]


async def _counts(client: Client, stream: str) -> Seen:
    info = await _api(client, f"CONSUMER.INFO.{stream}.c")
    places = [(info[each]["consumer_seq"], info[each]["stream_seq"]) for each in ("delivered", "ack_floor")]
    return [*places, *(info[each] for each in ("num_ack_pending", "num_redelivered", "num_waiting", "num_pending"))]


@_script
async def an_acknowledgement_removes_the_message_of_a_work_queue(client: Client, name: str) -> Seen:
    await _stream(client, name, retention="workqueue")
    await _create(client, name, _consumer("c", filter_subject=f"{name}.a"))
    await _publish(client, f"{name}.a", f"{name}.b", f"{name}.a")
    inbox = await _inbox(client)
    await inbox.pull(name, "c", batch=1)
    await inbox.until(1)
    await client.request(inbox.messages[0].reply, b"+ACK", timeout=_WAIT)
    state = (await _api(client, f"STREAM.INFO.{name}"))["state"]
    return [state[each] for each in ("messages", "first_seq", "last_seq")]


# --- permissions


DENIED: Final = ("$JS.API.CONSUMER.MSG.NEXT.>", "$JS.ACK.>")
"""Subjects to which the user of the next script may not publish."""


async def a_denied_message_has_no_effect_and_is_an_error_of_the_client(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _create(client, name, _consumer("c"))
    await _publish(client, f"{name}.a")
    inbox = await _inbox(client)
    seen: Seen = []
    for subject in (f"$JS.API.CONSUMER.MSG.NEXT.{name}.c", f"$JS.ACK.{name}.c.1.1.1.1.0"):
        await client.publish(subject, b'{"batch": 1}', reply=f"{inbox.subject}.1")
        async with asyncio.timeout(_WAIT):
            # The client reads the error and the answer to a flush in either order.
            while subject.lower() not in str(client.last_error):
                await client.flush()
        seen += [str(client.last_error).replace(name.lower(), "s"), await _counts(client, name)]
    return [*seen, inbox.seen, client.is_connected]


# --- streams and consumers


@_script
async def refusals_have_codes(client: Client, name: str) -> Seen:
    seen = [await _code(client, f"{verb}.{name}") for verb in ("STREAM.INFO", "CONSUMER.NAMES", "STREAM.DELETE")]
    await _stream(client, name)
    seen.append(await _code(client, f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.other"]}))
    seen.append(await _code(client, f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"]}))
    seen += [await _code(client, f"CONSUMER.{verb}.{name}.c") for verb in ("INFO", "DELETE")]
    seen.append(await _code(client, f"STREAM.MSG.GET.{name}", {"seq": 1}))
    seen.append(await _create(client, name, _consumer("c")))
    seen.append(await _create(client, name, _consumer("c")))
    seen.append(await _create(client, name, _consumer("c", ack_wait=5 * _SECOND)))
    seen.append(await _create(client, name, _consumer("c", ack_wait=5 * _SECOND), action="update"))
    seen.append(await _create(client, name, _consumer("d"), action="update"))
    info = await _api(client, f"CONSUMER.INFO.{name}.c")
    return [*seen, info["config"]["ack_wait"], (await _api(client, f"CONSUMER.NAMES.{name}"))["consumers"]]


@_script
async def a_work_queue_refuses_a_second_consumer_of_a_subject(client: Client, name: str) -> Seen:
    await _stream(client, name, retention="workqueue")
    wanted = [("c", "1.>"), ("d", "2.>"), ("e", "*.x"), ("f", "1.a"), ("g", "1.>")]
    return [await _create(client, name, _consumer(each, filter_subject=f"{name}.{key}")) for each, key in wanted]


@_script
async def a_message_is_found_by_sequence_and_subject(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _publish(client, f"{name}.a", f"{name}.b", f"{name}.a")
    asked: list[dict[str, object]] = [{"seq": 2}, {"seq": 2, "next_by_subj": f"{name}.a"}, {"seq": 4}]
    seen: Seen = []
    for fields in asked:
        answer = await _api(client, f"STREAM.MSG.GET.{name}", fields)
        message = answer.get("message")
        seen.append(answer["error"]["err_code"] if message is None else (message["seq"], message["data"]))
    return seen


@_script
async def a_consumer_starts_at_a_sequence(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _publish(client, *(f"{name}.a" for _ in range(3)))
    await _create(client, name, _consumer("c", deliver_policy="by_start_sequence", opt_start_seq=3))
    inbox = await _inbox(client)
    await inbox.pull(name, "c", batch=1)
    await inbox.until(1)
    return inbox.seen


@_script
async def a_removed_message_is_neither_delivered_nor_unacknowledged(client: Client, name: str) -> Seen:
    await _stream(client, name)
    await _create(client, name, _consumer("c", filter_subject=f"{name}.a"))
    await _publish(client, *(f"{name}.{each}" for each in "aabaaa"))
    inbox = await _inbox(client)
    await inbox.pull(name, "c", batch=3)
    await inbox.until(3)
    seen: Seen = [await _counts(client, name)]
    for sequence, left in ((1, (2, 2)), (4, (1, 2)), (5, (1, 1)), (3, (1, 1))):
        seen.append(await _code(client, f"STREAM.MSG.DELETE.{name}", {"seq": sequence}))
        # The server tells its consumers a moment after its answer.
        counts: Seen = []
        async with asyncio.timeout(_WAIT):
            while (counts[2:3], counts[5:6]) != ([left[0]], [left[1]]):
                counts = await _counts(client, name)
        seen.append(counts)
    seen.append(await _code(client, f"STREAM.MSG.DELETE.{name}", {"seq": 3}))
    await client.request(inbox.messages[0].reply, b"+ACK", timeout=_WAIT)
    await inbox.pull(name, "c", "2", batch=1)
    await inbox.until(4)
    state = (await _api(client, f"STREAM.INFO.{name}"))["state"]
    return [*seen, await _counts(client, name), inbox.seen, [state[each] for each in ("messages", "first_seq")]]


@_script
async def a_copy_of_a_message_is_not_stored(client: Client, name: str) -> Seen:
    await _stream(client, name)
    seen: Seen = []
    for message_id in ("one", "two", "one"):
        reply = await client.request(f"{name}.a", b"", timeout=_WAIT, headers={"Nats-Msg-Id": message_id})
        answer = json.loads(reply.data)
        seen.append((answer["seq"], answer.get("duplicate", False)))
    for subject in (f"{name}.a", f"{name}.>", f"other.{name}"):
        names = (await _api(client, "STREAM.NAMES", {"subject": subject})).get("streams") or []
        seen.append(names == [name])
    return seen


# --- buckets


async def _bucket(client: Client, name: str) -> str:
    config = {
        "name": f"KV_{name}",
        "subjects": [f"$KV.{name}.>"],
        "max_msgs_per_subject": 1,
        "discard": "new",
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": 60 * _SECOND,
        "first_seq": 1_000,
    }
    await _api(client, f"STREAM.CREATE.KV_{name}", config)
    return f"$KV.{name}."


async def _put(
    client: Client, subject: str, revision: int, fence: str = "", ttl: int = 0, value: bytes = b"v"
) -> object:
    headers = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
    if fence:
        headers["Nats-Expected-Last-Subject-Sequence-Subject"] = fence
    if ttl:
        headers["Nats-TTL"] = f"{ttl}s"
    answer = json.loads((await client.request(subject, value, timeout=_WAIT, headers=headers)).data)
    refusal = answer.get("error")
    return answer["seq"] if refusal is None else (refusal["code"], refusal["err_code"])


async def _get(client: Client, name: str, key: str) -> object:
    """The revision, the value and whether the entry is a marker; the code of a refusal without an entry."""
    answer = await _api(client, f"STREAM.MSG.GET.KV_{name}", {"last_by_subj": f"$KV.{name}.{key}"})
    if "error" in answer:
        return answer["error"]["err_code"]
    message = answer["message"]
    marker = b"Nats-Marker-Reason: MaxAge" in base64.b64decode(message.get("hdrs") or "")
    return message["seq"], base64.b64decode(message.get("data") or ""), marker


@_script
async def a_write_needs_the_newest_revision(client: Client, name: str) -> Seen:
    keys = await _bucket(client, name)
    seen = [await _get(client, name, "a")]
    seen += [await _put(client, f"{keys}a", revision) for revision in (0, 0, 999, 1_000, 1_000)]
    return [*seen, await _put(client, f"{keys}b.c", 0, value=b""), await _get(client, name, "b.c")]


@_script
async def a_fence_needs_its_revision(client: Client, name: str) -> Seen:
    keys = await _bucket(client, name)
    first = await _put(client, f"{keys}a", 0)
    seen = [await _put(client, f"{keys}b", revision, fence=f"{keys}a") for revision in (1_000, 1_001, 1_000)]
    return [first, *seen, await _put(client, f"{keys}b", 5, fence=f"{keys}none")]


@_script
async def a_key_expires_and_leaves_a_marker(client: Client, name: str) -> Seen:
    keys = await _bucket(client, name)
    seen = [await _put(client, f"{keys}a", 0, ttl=1), await _get(client, name, "a")]
    found = seen[1]
    for _ in range(300):
        if found != seen[1]:
            break
        await asyncio.sleep(0.1)
        found = await _get(client, name, "a")
    seen.append(found)
    seen.append(await _put(client, f"{keys}b", 1_000, fence=f"{keys}a"))
    seen.append(await _put(client, f"{keys}a", 0))
    return [*seen, await _put(client, f"{keys}a", 1_001)]


@_script
async def the_keys_of_a_bucket_are_listed(client: Client, name: str) -> Seen:
    keys = await _bucket(client, name)
    for key in ("m.a", "m.b", "lease.1"):
        await _put(client, keys + key, 0)
    asked: list[dict[str, object]] = [{"subjects_filter": f"{keys}m.>"}, {"subjects_filter": f"{keys}m.>", "offset": 2}]
    answers = [await _api(client, f"STREAM.INFO.KV_{name}", fields) for fields in asked]
    found = [(answer["total"], answer["state"].get("subjects") or {}) for answer in answers]
    return [(total, [key.removeprefix(keys) for key in sorted(listed)]) for total, listed in found]


@_script
async def a_deleted_bucket_has_no_responders(client: Client, name: str) -> Seen:
    keys = await _bucket(client, name)
    seen: Seen = [await _code(client, f"STREAM.DELETE.KV_{name}")]
    try:
        await _put(client, f"{keys}a", 0)
    except nats.errors.NoRespondersError:
        seen.append("no responders")
    return [*seen, await _get(client, name, "a")]


@_script
async def a_write_reaches_the_subscribers_of_its_key(client: Client, name: str) -> Seen:
    keys = await _bucket(client, name)
    heard: list[str] = []

    async def receive(message: Msg) -> None:
        heard.append(message.subject.removeprefix(keys))

    await client.subscribe(f"{keys}>", cb=receive)
    await client.flush()
    seen = [await _put(client, f"{keys}a", 0), await _put(client, f"{keys}a", 0)]
    await client.flush()
    return [*seen, heard]
