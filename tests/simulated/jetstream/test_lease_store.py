"""The lease store of a cohort keeps its contract on a simulated server that refuses or loses requests."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, Literal

import pytest
from nats.aio.client import Client

from lanes import ConfigError, SourceError
from lanes.clock import monotonic
from lanes.cohort.leases import Conflict, Entry, LeaseStore, UnknownResult
from lanes.cohort.membership import HINTED
from lanes_jetstream.cohort.lease_store import JetStreamLeaseStore
from lanes_jetstream.wire.connection import Connection
from memsource.contract.leases import LEASE_CHECKS, LeaseCheck
from tests.simulated.jetstream.server.server import Fate
from tests.simulated.jetstream.server.stream import Refused
from tests.simulated.jetstream.stage import Stage, played, refusal

BUCKET: Final = "lanes_orders_c"
STREAM: Final = f"KV_{BUCKET}"
KEYS: Final = f"$KV.{BUCKET}."
TIMEOUT: Final = 0.5

READ: Final = f"STREAM.MSG.GET.{STREAM}"
LIST: Final = f"STREAM.INFO.{STREAM}"
CREATE: Final = f"STREAM.CREATE.{STREAM}"


def store_of(stage: Stage, client: Client | None = None, **arguments: Any) -> JetStreamLeaseStore:
    return JetStreamLeaseStore(Connection(client or stage.client), BUCKET, **{"timeout": TIMEOUT, **arguments})


async def opened(stage: Stage, **arguments: Any) -> JetStreamLeaseStore:
    store = store_of(stage, **arguments)
    assert await store.open()
    return store


class Harness:
    """A bucket, and clients with separate connections."""

    def __init__(self, stage: Stage, clients: list[Client]) -> None:
        self._stage = stage
        self._clients = clients

    def store(self) -> LeaseStore:
        return store_of(self._stage, self._clients.pop())

    async def elapse(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def fail(self, store: LeaseStore, what: Literal["request", "reply"]) -> None:
        self._stage.meet(KEYS, Fate("drop_request" if what == "request" else "drop_reply"))


@pytest.mark.parametrize("check", LEASE_CHECKS, ids=lambda check: check.__name__)
def test_a_bucket_of_a_simulated_server_keeps_the_contract_of_a_lease_store(check: LeaseCheck) -> None:
    async def scene(stage: Stage) -> None:
        await opened(stage)
        clients = [await stage.connect() for _ in range(4)]
        await check(Harness(stage, list(clients)))
        for client in clients:
            await client.close()

    played(scene)


# --- the bucket


def test_a_new_bucket_keeps_one_value_of_each_key_and_drops_none() -> None:
    async def scene(stage: Stage) -> None:
        before = stage.server.api.nanoseconds(asyncio.get_running_loop().time()) // 1_000_000
        store = await opened(stage, replicas=3)
        (config,) = stage.fields(CREATE)
        first = config.pop("first_seq")
        assert abs(first - before) < 1000, "revisions begin with the time, in milliseconds"
        assert config == {
            "name": STREAM,
            "description": "leases of a lanes cohort",
            "subjects": [f"{KEYS}>"],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "num_replicas": 3,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": False,
            "allow_msg_ttl": True,
            "subject_delete_marker_ttl": 60_000_000_000,
        }
        assert not await store.open(), "the bucket exists"
        assert len(stage.fields(CREATE)) == 1

    played(scene)


FITS: Final[dict[str, Any]] = {
    "name": STREAM,
    "subjects": [f"{KEYS}>"],
    "max_msgs_per_subject": 1,
    "allow_msg_ttl": True,
    "discard": "new",
}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"max_msgs_per_subject": 5}, "its history is 5, not 1"),
        ({"allow_msg_ttl": False}, "its keys cannot expire (allow_msg_ttl)"),
        ({"allow_direct": True}, "replicas may answer instead of its leader (allow_direct)"),
        ({"subjects": ["$KV.other.>"]}, "its subjects are ['$KV.other.>']"),
        ({"max_age": 90_000_000_000}, "all of its keys expire (max_age is 90 s)"),
        ({"discard": "old", "max_bytes": 9}, "at max_bytes=9 it drops keys (discard is not 'new')"),
        ({"discard": "old", "max_msgs": 1}, "at max_msgs=1 it drops keys (discard is not 'new')"),
        ({"discard_new_per_subject": True}, "it refuses a second value of a key (discard_new_per_subject)"),
        (
            {"max_msgs_per_subject": -1, "allow_direct": True},
            "its history is -1, not 1; replicas may answer instead of its leader (allow_direct)",
        ),
    ],
)
def test_a_bucket_that_does_not_fit_is_refused_with_its_faults(config: dict[str, Any], said: str) -> None:
    async def scene(stage: Stage) -> None:
        await stage.api(CREATE, FITS | config)
        with pytest.raises(ConfigError) as refused:
            await store_of(stage).open()
        assert str(refused.value).startswith(f"bucket {BUCKET!r} does not fit: {said}; correct its stream {STREAM}, or")

    played(scene)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_bytes": 1000, "max_msgs": 9},
        {"discard": "old", "max_bytes": -1, "max_msgs": 0, "max_age": 0},
        {"max_age": None},
    ],
)
def test_a_bucket_whose_limits_drop_no_key_is_accepted(config: dict[str, Any]) -> None:
    async def scene(stage: Stage) -> None:
        await stage.api(CREATE, FITS | config)
        assert not await store_of(stage).open()

    played(scene)


@pytest.mark.parametrize("answer", [{"api": {"level": 0}}, {"api": {}}, {"api": None}, {}])
def test_a_server_without_expiring_keys_is_refused(answer: dict[str, Any]) -> None:
    async def scene(stage: Stage) -> None:
        stage.answer("INFO", answer)
        with pytest.raises(
            ConfigError, match=r"^the given connection: the server is too old for a cohort.*2\.11 or newer"
        ):
            await store_of(stage).open()
        assert not stage.server.api.buckets

    played(scene)


@pytest.mark.parametrize(("err_code", "kind"), [(10039, ConfigError), (10076, ConfigError), (10_000, SourceError)])
def test_an_account_without_jetstream_is_refused(err_code: int, kind: type[Exception]) -> None:
    async def scene(stage: Stage) -> None:
        stage.answer("INFO", refusal(503, err_code, "not enabled"))
        with pytest.raises(kind, match="the given connection: not enabled"):
            await store_of(stage).open()

    played(scene)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            refusal(500, 10_047, "insufficient storage"),
            "cannot be created: insufficient storage.*; correct the setting",
        ),
        (refusal(403, 9, "no"), "cannot be created: no"),
    ],
)
def test_a_bucket_that_cannot_be_created_is_an_error_of_the_configuration(answer: dict[str, Any], said: str) -> None:
    async def scene(stage: Stage) -> None:
        stage.answer(CREATE, answer)
        with pytest.raises(ConfigError, match=f"^bucket '{BUCKET}' {said}"):
            await store_of(stage).open()

    played(scene)


def test_a_start_waits_for_a_leader_and_a_later_look_does_not() -> None:
    async def scene(stage: Stage) -> None:
        stage.answer(LIST, *[refusal(503, 10_008, "no leader")] * 20)
        store = await opened(stage)
        await stage.api(f"STREAM.DELETE.{STREAM}")
        stage.answer(LIST, refusal(503, 10_008, "no leader"))
        with pytest.raises(UnknownResult, match="no leader"):
            await store.read("plan")
        assert await store.read("plan") == Entry(None, 0)

    played(scene)


@pytest.mark.parametrize("call", ["read", "entries", "write"])
def test_a_deleted_bucket_is_created_again_and_its_loss_is_logged(call: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        lease = await store.write("l.1", b"mine", revision=0)
        await stage.api(f"STREAM.DELETE.{STREAM}")
        if call == "read":
            assert await store.read("l.1") == Entry(None, 0)
        elif call == "entries":
            assert await store.entries("l.") == {}
        else:
            with pytest.raises(Conflict, match=r"'l.1': the bucket 'lanes_orders_c' is new, and empty"):
                await store.write("l.1", b"renewed", revision=lease)
        assert await store.write("l.1", b"new", revision=0) > lease

    with caplog.at_level(logging.ERROR):
        played(scene)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"bucket '{BUCKET}' was deleted with all leases")


def test_a_bucket_that_another_member_created_again_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        stage.answer(READ, refusal(404, 10_059))
        assert await store.read("plan") == Entry(None, 0)

    with caplog.at_level(logging.ERROR):
        played(scene)
    assert not caplog.records


@pytest.mark.parametrize("seen", ["written", "read"])
def test_revisions_of_a_new_bucket_are_above_all_that_were_seen(seen: str) -> None:
    """The clock of the machine may have gone back in the meantime."""

    async def scene(stage: Stage) -> None:
        other, store = await opened(stage), store_of(stage)
        bucket = stage.server.api.buckets[STREAM]
        bucket.data._revision = far = 1 << 50
        revision = await (store if seen == "written" else other).write("l.1", b"", revision=0)
        assert revision == far + 1
        assert await store.write("l.2", b"", revision=0) > revision if seen == "written" else await store.read("l.1")
        await stage.api(f"STREAM.DELETE.{STREAM}")
        assert await store.read("l.1") == Entry(None, 0)
        assert stage.fields(CREATE)[-1]["first_seq"] == (revision + 2 if seen == "written" else revision + 1)

    played(scene)


# --- requests


def test_a_condition_is_a_revision_or_a_fence_and_a_ttl_is_in_whole_seconds() -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        state = await store.write("s.1", b"1", revision=0)
        lease = await store.write("l.1", b"2", revision=0, ttl=7.0)
        await store.write("s.1", b"3", revision=None, fence=("l.1", lease))
        last = "Nats-Expected-Last-Subject-Sequence"
        assert [dict(each.headers) for each in stage.sent if each.subject.startswith(KEYS)] == [
            {last: "0"},
            {last: "0", "Nats-TTL": "7s"},
            {last: str(lease), f"{last}-Subject": f"{KEYS}l.1"},
        ]
        assert await store.read("s.1") == Entry(b"3", lease + 1)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"revision": None}, "write of 's.1': needs a revision or a fence"),
            ({"revision": state, "fence": ("l.1", lease)}, "write of 's.1': a revision and a fence exclude each other"),
            ({"revision": 0, "ttl": 0}, "ttl=0: must be whole seconds, 1 or more"),
            ({"revision": 0, "ttl": 1.5}, r"ttl=1\.5: must be whole seconds, 1 or more"),
        ]
        for condition, said in wrong:
            with pytest.raises(ValueError, match=said):
                await store.write("s.1", b"", **condition)
        for key in ("", "a..b", "a b", "a.*"):
            with pytest.raises(ValueError, match="must be tokens of letters"):
                await store.write(key, b"", revision=0)
        await store.write("l.9", b"", revision=0, ttl=1)

    played(scene)


def test_a_deletion_is_a_marker_without_a_value_on_the_condition_of_the_revision() -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        revision = await store.write("m.a", b"1", revision=0)
        with pytest.raises(Conflict):
            await store.delete("m.a", revision=revision + 1)
        await store.delete("m.a", revision=revision)
        sent = [each for each in stage.sent if each.subject.startswith(KEYS)][-1]
        headers = {"Nats-Expected-Last-Subject-Sequence": str(revision), "KV-Operation": "DEL"}
        assert (sent.subject, sent.payload, dict(sent.headers)) == (f"{KEYS}m.a", b"", headers)

    played(scene)


def test_a_prefix_of_keys_consists_of_whole_tokens() -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        for key in ("m.a", "m.b", "plan"):
            await store.write(key, key.encode(), revision=0)
        assert {key: entry.value for key, entry in (await store.entries("m.")).items()} == {
            "m.a": b"m.a",
            "m.b": b"m.b",
        }
        assert sorted(await store.entries("")) == ["m.a", "m.b", "plan"]
        assert [fields["subjects_filter"] for fields in stage.fields(LIST) if "subjects_filter" in fields] == [
            f"{KEYS}m.>",
            f"{KEYS}>",
        ]
        for prefix in ("m", ".", "*.", "m..", "m.>"):
            with pytest.raises(ValueError, match="must be empty, or whole tokens with a dot at the end"):
                await store.entries(prefix)

    played(scene)


def test_a_listing_names_no_key_that_a_client_deleted() -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        await store.write("m.a", b"1", revision=0)
        await store.write("m.b", b"2", revision=0)

        def deleted(answer: dict[str, Any]) -> dict[str, Any]:
            # The headers NATS/1.0\r\nKV-Operation: DEL
            return {"message": {"seq": 99, "hdrs": "TkFUUy8xLjANCktWLU9wZXJhdGlvbjogREVMDQoNCg=="}}

        stage.answer(READ, deleted)
        assert list(await store.entries("m.")) == ["m.b"]
        stage.answer(READ, deleted)
        assert await store.read("m.a") == Entry(None, 99)

    played(scene)


@pytest.mark.parametrize("code", [408, 500, 503])
@pytest.mark.parametrize("call", ["read", "write", "list"])
def test_trouble_of_the_server_has_an_unknown_result_and_a_refusal_is_final(call: str, code: int) -> None:
    what = {"read": "read of 'm.a'", "write": "write of 'm.a'", "list": "list of 'm.'"}[call]

    async def ask(stage: Stage, store: JetStreamLeaseStore, code: int) -> None:
        if call == "write":
            bucket = stage.server.api.buckets[STREAM]
            put = bucket.put
            bucket.put = lambda *_: refuse(code)  # type: ignore[method-assign]
            try:
                await store.write("m.a", b"", revision=0)
            finally:
                bucket.put = put  # type: ignore[method-assign]
        else:
            stage.answer(READ if call == "read" else LIST, refusal(code, 77, "says no"))
            await (store.read("m.a") if call == "read" else store.entries("m."))

    def refuse(code: int) -> int:
        raise Refused(code, 77, "says no")

    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        with pytest.raises(UnknownResult, match=rf"^bucket '{BUCKET}': {what} is refused \(says no \(77\)\)$"):
            await ask(stage, store, code)
        with pytest.raises(SourceError, match=rf"^bucket '{BUCKET}': {what} is refused \(says no \(77\)\)$"):
            await ask(stage, store, 400)

    played(scene)


@pytest.mark.parametrize(
    "message", [None, [], {}, {"seq": None}, {"seq": "x"}, {"seq": 1, "data": "a"}, {"seq": 1, "hdrs": 5}]
)
def test_a_malformed_answer_names_its_request(message: object) -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        stage.answer(READ, {} if message is None else {"message": message})
        with pytest.raises(SourceError, match=r"the read of 'plan' has a malformed answer \(\w*Error\); check that"):
            await store.read("plan")

    played(scene)


def test_a_failed_read_of_one_key_fails_the_listing() -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        for number in range(40):
            await store.write(f"m.{number}", b"", revision=0)
        stage.answer(READ, refusal(503, 77, "busy"))
        with pytest.raises(UnknownResult, match="busy"):
            await store.entries("m.")
        assert len(await store.entries("m.")) == 40

    played(scene)


@pytest.mark.parametrize(("fate", "timeout"), [("drop_request", 0.5), ("drop_reply", 2.0)])
def test_a_request_without_an_answer_has_an_unknown_result_after_the_timeout(
    fate: Any, timeout: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lanes.jetstream")

    async def scene(stage: Stage) -> None:
        store = await opened(stage, timeout=timeout)
        began = monotonic()
        stage.meet(KEYS, Fate(fate), Fate(fate))
        with pytest.raises(
            UnknownResult, match=rf"^bucket '{BUCKET}': write of 'plan' has no answer \(TimeoutError\)$"
        ):
            await store.write("plan", b"", revision=0)
        assert monotonic() - began == pytest.approx(timeout, abs=0.01)
        assert store._connection.outage() is None, "one request may fail after a freeze of the process"
        with pytest.raises(UnknownResult):
            await store.write("plan", b"", revision=0)
        outage = store._connection.outage()
        assert outage is not None
        assert outage.seconds == pytest.approx(2 * timeout, abs=0.01)
        assert "write of 'plan' has no answer" in outage.error
        assert (await store.read("plan")).value == (b"" if fate == "drop_reply" else None)
        assert store._connection.outage() is None
        told = [each.getMessage() for each in caplog.records if each.name == "lanes.jetstream"]
        if 2 * timeout < 3.0:
            assert told == [], "an outage of less than 3 s has no line"
        else:
            warning, end = told
            assert f": no NATS server has answered for {2 * timeout:.0f} s (bucket " in warning
            assert end.endswith(f": a NATS server answers again after {2 * timeout:.0f} s")
        lines = len(caplog.messages)
        await store.read("plan")
        assert len(caplog.messages) == lines

    played(scene)


def test_a_request_waits_for_the_connection_only_within_its_timeout() -> None:
    """By default, the client keeps a request during a reconnect, and sends it later."""

    async def scene(stage: Stage) -> None:
        store = await opened(stage, timeout=2.0)
        revision = await store.write("plan", b"1", revision=0)
        stage.server.stop()
        await asyncio.sleep(0.1)
        began = monotonic()
        with pytest.raises(UnknownResult):
            await store.write("plan", b"2", revision=revision)
        assert monotonic() - began == pytest.approx(2.0, abs=0.01)
        stage.server.start(monotonic())
        await asyncio.sleep(1.0)
        assert await store.read("plan") == Entry(b"1", revision)
        stage.server.stop()
        await asyncio.sleep(0.1)
        stage.server.later(monotonic() + 0.5, stage.server.start)
        stage.network.schedule()
        assert await store.read("plan") == Entry(b"1", revision)

    played(scene)


def test_a_closed_connection_is_final() -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        store = store_of(stage, client)
        await store.open()
        await client.close()
        for call in (store.read("plan"), store.entries("m.")):
            with pytest.raises(SourceError, match=r"^the given connection: the connection is closed permanently"):
                await call

    played(scene)


def test_a_denied_request_names_the_permission() -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        stage.deny(f"{KEYS}plan")
        with pytest.raises(
            SourceError, match=r"write of 'plan': permissions violation.*; grant this permission, then start again$"
        ):
            await store.write("plan", b"", revision=0)
        # Only a denial of this request explains its missing answer.
        stage.meet(f"{KEYS}m.a", Fate("drop_request"))
        with pytest.raises(UnknownResult):
            await store.write("m.a", b"", revision=0)

    played(scene)


@pytest.mark.parametrize("silent", [True, False])
def test_a_bucket_without_a_leader_refuses_no_write_for_good(silent: bool) -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        stage.server.lose_leader(STREAM, 1e9, monotonic(), silent=silent)
        with pytest.raises(UnknownResult, match="the write of 'plan' has no leader at the moment"):
            await store.write("plan", b"", revision=0)

    played(scene)


def test_a_write_whose_bucket_exists_finds_no_leader_at_the_moment() -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        bucket = stage.server.api.buckets.pop(STREAM)
        stage.answer(LIST, lambda _: {"config": bucket.config, "created": "", "state": {}})
        with pytest.raises(UnknownResult, match="the write of 'plan' has no leader at the moment"):
            await store.write("plan", b"", revision=0)
        assert not stage.server.api.buckets, "no second bucket was created"
        stage.deny(f"$JS.API.{LIST}")
        with pytest.raises(SourceError, match=rf"^bucket '{BUCKET}': the given connection: permissions violation"):
            await store.write("plan", b"", revision=0)

    played(scene)


def test_a_bucket_that_cannot_be_created_again_is_tried_again_unless_the_fault_is_permanent() -> None:
    async def scene(stage: Stage) -> None:
        store = await opened(stage)
        await stage.api(f"STREAM.DELETE.{STREAM}")
        stage.answer(CREATE, refusal(503, 10_008, "no leader"))
        with pytest.raises(UnknownResult, match=rf"^bucket '{BUCKET}' at the given connection: no leader"):
            await store.read("plan")
        # JetStream answered at the start, so its server restarts or is cut off.
        stage.answer("INFO", refusal(403, 7, "not allowed"))
        with pytest.raises(SourceError, match=rf"^bucket '{BUCKET}' at the given connection: not allowed") as refused:
            await store.read("plan")
        assert not refused.value.retryable
        stage.deny(f"$JS.API.{CREATE}")
        with pytest.raises(SourceError, match="permissions violation"):
            await store.read("plan")

    played(scene)


def test_writes_use_the_prefix_of_a_domain() -> None:
    async def scene(stage: Stage) -> None:
        store = JetStreamLeaseStore(Connection(stage.client.jetstream(domain="hub")), BUCKET, timeout=TIMEOUT)
        with pytest.raises(UnknownResult):
            await store.write("plan", b"", revision=0)
        assert stage.subjects("$")[0] == f"$JS.hub.API.{KEYS}plan"

    played(scene)


def test_each_write_sends_a_hint_until_the_store_is_closed() -> None:
    async def scene(stage: Stage) -> None:
        store, keys = await opened(stage), list[str]()
        await store.watch(HINTED, keys.append)
        await store.write("s.17", b"1", revision=0)
        await store.write("l.17", b"1", revision=0)
        assert keys == ["l.17"]
        await store.aclose()
        await store.write("l.18", b"1", revision=0)
        await store.aclose()
        assert keys == ["l.17"]
        assert stage.server.sessions[0].hears(f"{KEYS}l.1") == []
        client = await stage.connect()
        closed = store_of(stage, client)
        await closed.watch(HINTED, keys.append)
        await client.close()
        await closed.aclose()

    played(scene)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "ä", "a>"])
def test_an_invalid_name_of_a_bucket_is_refused(name: str) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(ConfigError, match="may contain only letters, digits, - and _"):
            JetStreamLeaseStore(Connection(stage.client), name)
        made = JetStreamLeaseStore(Connection(stage.client), "Az-09_")
        assert repr(made) == "<JetStreamLeaseStore Az-09_>"

    played(scene)
