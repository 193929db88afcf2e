"""``lanes cohort`` shows the status of a cohort, and drains a member."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

import lanes
from lanes.cli import app as cli
from lanes.core.cohort.records import DrainRequest, drain_key, encode
from lanes_jetstream.cohort.lease_store import bucket_name
from tests.jetstream.cohort_workload import FAST, CohortStream, Gate, Log, members, owned, settled
from tests.jetstream.workload import until

pytestmark = pytest.mark.anyio


class Output(NamedTuple):
    status: object
    out: str
    err: str


Command = Callable[..., Awaitable[Output]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    # A slow server is no subject of these tests.
    monkeypatch.setattr("lanes.cli.kit._SILENT_FOR", 3_600.0)

    def run(arguments: tuple[str, ...]) -> Output:
        monkeypatch.setattr(sys, "argv", ["lanes", "cohort", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Output(ended.value.code or 0, captured.out, captured.err)

    async def command(*arguments: str) -> Output:
        # The command needs its own thread and loop. asyncio.to_thread would report a running loop there.
        return await asyncio.get_running_loop().run_in_executor(None, run, arguments)

    return command


def rows_of(value: object) -> list[dict[str, object]]:
    assert isinstance(value, list)
    return value


async def test_the_status_command_shows_owners_and_progress_of_a_cohort(
    cohort_stream: CohortStream, command: Command
) -> None:
    stream, log = cohort_stream, Log()
    keys = stream.a_key_each()
    gate = Gate(keys[1])
    a, b = (
        lanes.Consumer(stream.source(name, active_members=3, consumer_target=1), log.handler(name, gate), settings=FAST)
        for name in "ab"
    )
    where = "--stream", stream.name, "--server", stream.url
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        running.join(b)
        await settled(a, b, partitions=4)
        await stream.publish(*keys, times=2)
        await until(lambda: gate.waiting == 1)
        await log.handled(6)

        async def acknowledged() -> dict[str, object]:
            while True:
                said = await command("status", *where, "--json")
                assert (said.status, said.err) == (0, "")
                found: dict[str, object] = json.loads(said.out)
                if found["lag"] == 2:
                    return found

        found = await acknowledged()
        said = await command("status", *where)
        gate.open()
        await log.handled(8)
    of = {number: "a" if number in {run.partition for run in log.of("a")} else "b" for number in range(4)}
    assert (found["cohort"], found["namespace"], found["active_members"]) == ("orders", "lanes", 3)
    assert (found["too_few_members"], found["under_provisioned"], found["plan_rules"]) == (True, True, 1)
    partitions = found["partitions"]
    assert isinstance(partitions, list)
    assert [(one["number"], one["owner"], one["planned"]) for one in partitions] == [(n, of[n], of[n]) for n in of]
    assert [one["lag"] for one in partitions] == [0, 2, 0, 0]
    assert all((one["oldest"] is not None) == (one["number"] == 1) for one in partitions)
    assert [one["epoch"] for one in partitions] == [
        max(run.epoch for run in log.runs if run.partition == number) for number in range(4)
    ]
    fields = ("name", "live", "partitions", "planned", "consumer_target")
    shares = [tuple(one[field] for field in fields) for one in rows_of(found["members"])]
    assert shares == [("a", True, 2, 2, 1), ("b", True, 2, 2, 1)]
    assert (said.status, said.err) == (0, "")
    assert f"cohort orders in namespace lanes of stream {stream.name}" in said.out
    assert "TOO FEW MEMBERS: 2 of 3. UNDER-PROVISIONED: 2 member(s) above the target" in said.out
    assert len(said.out.splitlines()) == 1 + 1 + 2 + 1 + 4


async def test_the_drain_command_drains_a_member(cohort_stream: CohortStream, command: Command) -> None:
    stream, log = cohort_stream, Log()
    keys = stream.a_key_each()
    a, b = (lanes.Consumer(stream.source(name), log.handler(name), settings=FAST) for name in "ab")
    where = "--stream", stream.name, "--server", stream.url
    async with members() as running:
        running.join(a, b)
        await settled(a, b, partitions=4)
        assert await command("drain", "b", *where) == (0, "b: is drained\n", "")
        await until(lambda: owned(a) == {0, 1, 2, 3})
        assert await command("drain", "b", *where) == (0, "b: is drained already\n", "")
        status = json.loads((await command("status", "--stream", stream.name, "--server", stream.url, "--json")).out)
        assert [(one["name"], one["draining"], one["planned"]) for one in status["members"]] == [
            ("a", False, 4),
            ("b", True, 0),
        ]
        await stream.publish(*keys)
        await log.handled(4)
        assert log.of("b") == []
        said = await command("drain", "c", *where)
        assert (said.status, said.out) == (3, "")
        assert said.err == "lanes: 'c' is no live member; name one of a, b\n"
        assert await command("undrain", "b", *where) == (0, "b: is not drained any more\n", "")
        await until(lambda: len(owned(b)) == 2)
        assert await command("undrain", "b", *where) == (0, "b: was not drained\n", "")
    said = await command("drain", "b", *where)
    assert (said.status, said.out) == (3, "")
    assert said.err == "lanes: 'b' is no live member; the cohort has none, so start a member first\n"


async def test_a_drain_that_outlives_its_member_can_be_withdrawn(cohort_stream: CohortStream, command: Command) -> None:
    stream, log = cohort_stream, Log()
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    where = "--server", stream.url
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        # As after a kill: a member that leaves in order withdraws its drain.
        subject = f"$KV.{bucket_name(stream.name, 'lanes')}.{drain_key('b')}"
        await stream.client.request(subject, encode(DrainRequest(5)), timeout=5)
        b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
        status = json.loads((await command("status", "--stream", stream.name, *where, "--json")).out)
        assert [(one["name"], one["live"], one["draining"]) for one in status["members"]] == [
            ("a", True, False),
            ("b", False, True),
        ]
        assert " gone, to be drained " in (await command("status", "--stream", stream.name, *where)).out
        running.join(b)
        await until(lambda: b.ready)
        assert (owned(a), owned(b)) == ({0, 1, 2, 3}, set())
        said = await command("undrain", "b", "--stream", stream.name, *where)
        assert said == (0, "b: is not drained any more\n", "")
        await settled(a, b, partitions=4)
        assert len(owned(b)) == 2


async def test_the_cohort_command_prints_one_line_about_a_missing_cohort_and_creates_nothing(
    cohort_stream: CohortStream, command: Command
) -> None:
    stream = cohort_stream
    for arguments, words in [
        (("status", "--stream", stream.name, "--server", stream.url), "has no cohort; start a member"),
        (
            ("status", "--stream", stream.name, "--server", stream.url, "--namespace", "x"),
            "has no cohort in the namespace 'x'",
        ),
        (("drain", "a", "--stream", stream.name, "--server", stream.url), "has no cohort; start a member"),
        (("status", "--stream", f"{stream.name}S", "--server", stream.url), f"(did you mean {stream.name!r}?)"),
        (("status", "--stream", f"{stream.name}S", "--server", stream.url), "S' does not exist at "),
        (("status", "--stream", f"{stream.name}S", "--server", stream.url), "create it, or correct --stream "),
    ]:
        said = await command(*arguments)
        assert (said.status, said.out) == (3, "")
        assert said.err.startswith("lanes: ") and said.err.count("\n") == 1 and words in said.err
    assert await stream.buckets() == []


@pytest.mark.parametrize("name", ["status", "drain", "undrain"])
async def test_a_missing_option_is_named_alike_in_every_command(command: Command, name: str) -> None:
    member = () if name == "status" else ("a",)
    for given, missing in (
        (("--server", "nats://127.0.0.1:1"), "--stream NAME"),
        (("--stream", "S"), "--server URL"),
    ):
        assert await command(name, *member, *given) == (
            64,
            "",
            f"lanes: `lanes cohort {name}` needs {missing}; run `lanes cohort {name} --help`\n",
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--stream", "a b", "--server", "nats://127.0.0.1:1"), "--stream='a b': must be a name without blanks, dots"),
        (("--stream", "", "--server", "nats://127.0.0.1:1"), "--stream='': must be a name without blanks"),
        (("--stream", "S", "--server", "http://127.0.0.1:1"), "--server: the scheme http:// is not a scheme of NATS"),
        (
            ("--stream", "S", "--namespace", "x y", "--server", "nats://127.0.0.1:1"),
            "--namespace='x y': must be 1 to 64 letters, digits, - and _",
        ),
    ],
)
async def test_a_malformed_option_is_refused_before_the_command_connects(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    said = await command("status", *arguments)
    assert (said.status, said.out) == (64, "")
    assert said.err.startswith(f"lanes: {words}") and said.err.count("\n") == 1


async def test_the_cohort_command_prints_one_line_about_a_malformed_record(
    cohort_stream: CohortStream, command: Command
) -> None:
    stream, log = cohort_stream, Log()
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
    subject = f"$KV.{bucket_name(stream.name, 'lanes')}.m.x"
    await stream.client.request(subject, b"\x1b[2Jno", timeout=5)
    said = await command("status", "--stream", stream.name, "--server", stream.url)
    assert (said.status, said.out) == (3, "")
    assert "the key 'm.x'" in said.err and "\x1b" not in said.err and said.err.count("\n") == 1


async def test_one_of_several_cohorts_must_be_selected(cohort_stream: CohortStream, command: Command) -> None:
    stream, log = cohort_stream, Log()
    a, b = (
        lanes.Consumer(stream.source(name, namespace=name), log.handler(name), settings=FAST) for name in ("one", "two")
    )
    async with members() as running:
        running.join(a, b)
        await settled(a, partitions=4)
        await settled(b, partitions=4)
        said = await command("status", "--stream", stream.name, "--server", stream.url)
        assert "has several cohorts; select one by --namespace: one, two" in said.err
        said = await command("status", "--stream", stream.name, "--server", stream.url, "--namespace", "two", "--json")
        assert [one["name"] for one in json.loads(said.out)["members"]] == ["two"]
