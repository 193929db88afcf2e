"""``lanes ring assign``, ``split``, ``status`` and ``history`` on a real server."""

from __future__ import annotations

import json
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest

from lanes.cli import app as cli
from lanes.cli import kit
from tests.postgres.log.logs import Logs
from tests.postgres.log.test_subscriptions import until
from tests.postgres.ring.ranged import HALF, HIGH, LOW, Ring, some

Command = Callable[..., tuple[object, str, str]]


@pytest.fixture
def ring(logs: Logs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``lanes ring …`` on the log, in the group ``billing``."""
    monkeypatch.setenv("COLUMNS", "600")
    monkeypatch.setattr(kit, "_SILENT_FOR", 3_600.0)

    def command(verb: str, *arguments: str, group: str = "billing", log: str = "orders") -> tuple[object, str, str]:
        place = ("--log", log, "--group", group, "--dsn", logs.url, "--schema", logs.schema)
        monkeypatch.setattr("sys.argv", ["lanes", "ring", verb, *place, *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return command


def test_ranges_are_assigned_split_and_shown(ring: Command) -> None:
    assert ring("assign", "0", "0x7fff", "a")[:2] == (0, "0-32767: assigned to a\n")
    assert ring("assign", "0", "32767", "a")[:2] == (0, "0-32767: unchanged, owned by a\n")
    assert ring("split", "0x4000", "b")[:2] == (0, "16384-32767: assigned to b\n")
    status, out, err = ring("status")
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()[:4]] == [
        ["lo", "hi", "slots", "share", "consumer"],
        ["0", "16383", "16384", "25.00", "%", "a"],
        ["16384", "32767", "16384", "25.00", "%", "b"],
        ["32768", "65535", "32768", "50.00", "%", "(nobody)"],
    ]
    status, out, _ = ring("history")
    assert status == 0
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        ["1", "0", "32767", "a"],
        ["2", "16384", "32767", "b"],
    ]


def test_status_and_history_are_printed_as_json(ring: Command) -> None:
    ring("assign", "0", "99", "a")
    _, out, _ = ring("status", "--json")
    assert json.loads(out) == {
        "ranges": [{"lo": 0, "hi": 99, "consumer": "a"}, {"lo": 100, "hi": 65_535, "consumer": None}],
        "consumers": [{"consumer": "a", "processes": 0, "slots": 100, "waiting_messages": 0}],
        "unowned_messages": 0,
    }
    (event,) = json.loads(ring("history", "--json")[1])
    assert {name: event[name] for name in ("number", "lo", "hi", "consumer", "login")} == {
        "number": 1,
        "lo": 0,
        "hi": 99,
        "consumer": "a",
        "login": "lanes",
    }


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["assign", "0", "65536", "a"], 64, "HI '65536': must be a slot, 0 to 65535"),
        (["split", "65536", "a"], 64, "SLOT '65536': must be a slot, 0 to 65535"),
        (["split", "0x10000", "a"], 64, "SLOT '0x10000': must be a slot, 0 to 65535"),
        (["assign", "5", "4", "a"], 64, "lo=5, hi=4: a range ends at or above its first slot"),
        (["assign", "zero", "4", "a"], 64, "LO 'zero': must be a slot, 0 to 65535 or 0x0 to 0xffff"),
        (["assign", "0", "٤", "a"], 64, r"HI '\u0664': must be a slot"),
        (["split", "4", "x" * 201], 64, "CONSUMER 'x"),
        (["assign", "0", "4"], 64, "`lanes ring assign` needs CONSUMER"),
        (["assign", "0", "4", ""], 64, "CONSUMER '': must be a str of 1 to 200 characters"),
        (["split", "5", "a"], 3, "'billing' of the log 'orders' in the schema "),
        (["split", "5", "a"], 3, "nobody owns slot 5, so there is no range to split; assign a range"),
        (["split", "x", "a"], 64, "SLOT 'x': must be a slot"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(ring: Command, arguments: list[str], status: int, said: str) -> None:
    found, out, err = ring(*arguments)
    assert (found, out, err.count("\n")) == (status, "", 1)
    assert said in err


@pytest.mark.parametrize("verb", ["status", "history"])
def test_a_group_without_assignments_is_named(ring: Command, verb: str) -> None:
    ring("assign", "0", "4", "a")
    assert "no assignments" not in ring(verb)[1]
    status, out, err = ring(verb, group="biling")
    assert (status, err) == (0, "")
    assert "the group 'biling' of the log 'orders' has no assignments; correct --group" in out


@pytest.mark.parametrize("verb", ["status", "history"])
def test_a_wrong_place_is_one_line_with_the_remedy(ring: Command, verb: str) -> None:
    assert "has no log 'none'; call" in ring(verb, log="none")[2]
    assert "has no log 'ordrs' (did you mean 'orders'?); call" in ring(verb, log="ordrs")[2]
    assert "--group='': must be a str of 1 to 200 characters" in ring(verb, group="")[2]
    assert "--log='': must be a str of 1 to 200 characters" in ring(verb, log="")[2]
    assert (
        "could not connect" in ring(verb, "--dsn", "host=/nowhere")[2]
        or "no such" in ring(verb, "--dsn", "host=/nowhere")[2].lower()
    )


def test_a_hostile_name_is_shown_escaped(ring: Command) -> None:
    ring("assign", "0", "4", "a\x1b[2J")
    for verb in ("status", "history"):
        _, out, _ = ring(verb)
        assert "\x1b" not in out
        assert "a\\x1b[2J" in out


def test_a_name_under_which_no_process_has_run_is_noted_with_a_similar_name(ring: Command, logs: Logs) -> None:
    noted = (
        "lanes: no process of the group 'billing' has run as {!r} yet{}; the messages of its slots wait until one "
        "starts\n"
    )
    assert ring("assign", "0", "9", "worker-1") == (0, "0-9: assigned to worker-1\n", noted.format("worker-1", ""))

    async def run() -> None:
        async with Ring(logs).member("worker-1"):
            with anyio.fail_after(20):
                while not logs.execute("SELECT consumer FROM {}.lanes_ring_consumers"):
                    await anyio.sleep(0.02)

    anyio.run(run)
    assert ring("assign", "0", "9", "worker-1") == (0, "0-9: unchanged, owned by worker-1\n", "")
    meant = " (did you mean 'worker-1'?)"
    assert ring("split", "5", "wroker-1") == (0, "5-9: assigned to wroker-1\n", noted.format("wroker-1", meant))
    status, out, err = ring("assign", "10", "19", "wroker-1")
    assert (status, out, err) == (0, "10-19: assigned to wroker-1\n", noted.format("wroker-1", meant))


@pytest.mark.anyio
async def test_status_shows_which_owners_run_and_how_many_messages_wait_for_each(ring: Command, logs: Logs) -> None:
    group = Ring(logs)
    group.assign(LOW, "worker-a")
    group.assign(HIGH, "worker-b")
    async with group.member("worker-a") as running, group.member("worker-b"):
        group.append(*some(LOW, 3), *some(HIGH, 2))
        while True:
            facts = json.loads((await anyio.to_thread.run_sync(ring, "status", "--json"))[1])
            if not sum(each["waiting_messages"] for each in facts["consumers"]):
                break
        group.assign(HIGH, "wroker-b")
        running.close()
        group.append(*some(LOW, 2), *some(HIGH, 4))
        await until(lambda: len(running.begun) == 5)
        status, out, err = await anyio.to_thread.run_sync(ring, "status")
        facts = json.loads((await anyio.to_thread.run_sync(ring, "status", "--json"))[1])
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()[4:8]] == [
        ["consumer", "processes", "slots", "waiting", "messages"],
        ["worker-a", "1", str(HALF), "2"],
        ["worker-b", "1", "0", "0"],
        ["wroker-b", "0", str(HALF), "4"],
    ]
    meant = "(did you mean 'worker-b'?); start it, or assign its slots to another consumer"
    assert out.splitlines()[8:] == [f"no process runs as 'wroker-b', and none has run before {meant}"]
    assert [(each["consumer"], each["processes"], each["waiting_messages"]) for each in facts["consumers"]] == [
        ("worker-a", 1, 2),
        ("worker-b", 1, 0),
        ("wroker-b", 0, 4),
    ]
    status, out, _ = await anyio.to_thread.run_sync(ring, "status")
    assert "no process runs as 'worker-a'; start it" in out, "a process that has ended is not running"
