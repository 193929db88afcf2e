"""``lanes dead-letters list`` and ``show`` print no payload unless it is requested, on each backend."""

from __future__ import annotations

import base64
import json
import re

import pytest

from lanes.history.writer import key_hash
from tests.backends.dead_letter_places import HERE, Command, JetStreamPlace, Place, PostgresPlace, ids, of
from tests.components import NatsServer, PostgresServer

KEY, HEADER, VALUE = "canary-key-5e1f", "canary-header-5e1f", "canary-value-5e1f"
HOSTILE = "\x1b[2J\x07[bold]\u202e:warning:"


def test_a_list_shows_origin_and_reason_and_no_user_data(command: Command, place: Place) -> None:
    sent = of(place, key=KEY.encode(), value=VALUE.encode(), headers=(("x", HEADER.encode()),))
    place.park(sent)
    for said in (command("list", *place.options), command("list", *place.options, "--json")):
        assert said.status == 0
        for shown in (sent.id, place.origin, key_hash(KEY.encode()), "ValueError"):
            assert shown in said.out
        assert not any(canary in said.out + said.err for canary in (KEY, HEADER, VALUE))
    (row,) = [json.loads(line) for line in said.out.splitlines()]
    assert (row["partition"], row["position"], row["attempts"]) == (3, sent.position, 5)
    assert (row["time"], row["published"], row["bytes"], row["cut"]) == (sent.time, sent.timestamp, len(VALUE), False)


def test_a_list_shows_the_reasons_of_the_handlers(command: Command, place: Place) -> None:
    place.park(
        of(place, error_type="KeyError", error_text="'tariff'\nof 2026"),
        of(place, error_type="Nak", error_text="busy"),
        of(place, error_type="Term", error_text="x" * 500),
    )
    said = command("list", *place.options)
    heading, *rows = said.out.splitlines()
    assert "reason" in heading.split()
    assert [line for line in said.out.splitlines() if line.endswith(" ")] == []
    # Each dead letter has one line, because a program that reads the table needs the reason unfolded.
    assert len(rows) == 3
    assert r"KeyError: 'tariff'\nof 2026 " in rows[0]
    assert " busy " in rows[1] and "Nak" not in rows[1]
    assert f" {'x' * 79}… " in rows[2]


def test_a_narrow_list_folds_the_reason_and_cuts_no_id(
    command: Command, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes.cli.dead_letters._WIDE", 80)
    sent = of(place, error_type="Term", error_text="no such customer in any of our books")
    place.park(sent)
    heading, *lines = command("list", *place.options).out.splitlines()
    assert heading.split() == ["id", "origin", "reason"]
    assert sent.id in lines[0] and len(lines) > 1
    assert [word for word in " ".join(lines).split() if word in sent.error_text.split()] == sent.error_text.split()


def test_a_list_is_limited_and_says_so(command: Command, place: Place) -> None:
    place.park(*(of(place) for _ in range(20)))
    said = command("list", *place.options, "--json", "--limit", "18")
    assert len(said.out.splitlines()) == 18
    assert said.err == "lanes: there are more than 18 dead letters; use --limit to show more\n"
    said = command("list", *place.options, "--json", "--limit", "20")
    assert (len(said.out.splitlines()), said.err) == (20, "")


def test_a_list_of_a_partitioned_queue_is_the_union_of_its_partitions(command: Command, place: Place) -> None:
    names = ["orders", "orders__p1", "orders__p2", "other"]
    # More than one page of the box.
    sent = {name: [of(place, source=name, subject=name) for _ in range(9)] for name in names}
    place.park(*(one for each in zip(*sent.values(), strict=True) for one in each))

    def listed(*options: str, note: str = "") -> list[str]:
        said = command("list", *place.options, "--json", *options)
        assert (said.status, said.err) == (
            0,
            note and f"lanes: left out: {note} to select all partitions of the queue\n",
        )
        return sorted(json.loads(line)["id"] for line in said.out.splitlines())

    def union(*queues: str) -> list[str]:
        return sorted(one.id for name in queues for one in sent[name])

    assert listed(
        "--queue", "orders", "--partitions", "2", note="9 dead letter(s) of orders__p2; raise --partitions"
    ) == union("orders", "orders__p1")
    assert listed("--queue", "orders", "--partitions", "3") == union(*names[:3])
    # A physical queue alone, and two queues.
    missing = "18 dead letter(s) of orders__p1, orders__p2; add --partitions NUMBER"
    assert listed("--queue", "orders", note=missing) == union("orders")
    assert listed("--queue", "orders__p2", "--queue", "other") == union("orders__p2", "other")
    said = command("list", *place.options, "--json", "--queue", "orders", "--partitions", "3", "--limit", "26")
    assert len(said.out.splitlines()) == 26
    assert said.err == "lanes: there are more than 26 dead letters; use --limit to show more\n"
    said = command("list", *place.options, "--queue", "third", "--partitions", "6")
    assert (said.status, said.out) == (0, "")
    assert said.err.endswith(": no dead letters of third, third__p1, third__p2, third__p3 and 2 more\n")


def test_a_registered_queue_needs_no_number_of_partitions(command: Command, place: Place) -> None:
    names = ["orders-eu", "orders-us", "orders__p2", "orders__p3"]
    sent = [of(place, source=name, subject=name, queue="orders", queue_partition=n) for n, name in enumerate(names[:3])]
    # The name looks like a partition, and its consumer registered another queue.
    sent.append(of(place, source=names[3], subject=names[3], queue="other", queue_partition=0))
    place.park(*sent)

    def listed(*options: str, note: str = "") -> list[str]:
        said = command("list", *place.options, "--json", *options)
        assert (said.status, said.err) == (0, note)
        return [json.loads(line)["source"] for line in said.out.splitlines()]

    assert listed("--queue", "orders") == names[:3]
    assert listed("--queue", "orders-us") == names[1:2]
    left_out = "1 dead letter(s) of orders__p2; raise --partitions to select all partitions of the queue"
    assert listed("--queue", "orders", "--partitions", "2", note=f"lanes: left out: {left_out}\n") == names[:2]
    said = command("show", sent[1].id, *place.options)
    assert "orders, partition 1" in said.out
    said = command("list", *place.options, "--json", "--queue", "other")
    (row,) = [json.loads(line) for line in said.out.splitlines()]
    assert (row["queue"], row["queue_partition"]) == ("other", 0)
    said = command("replay", *place.options, "--all", "--queue", "orders", "--handler", f"{HERE}:remember")
    assert said.err.endswith("lanes: 3 replayed, 0 stay\n")
    assert ids(command, place) == [sent[3].id]


def test_a_replay_of_a_partitioned_queue_leaves_the_other_dead_letters(command: Command, place: Place) -> None:
    sent = {name: of(place, source=name, subject=name) for name in ("orders", "orders__p1", "other")}
    place.park(*sent.values())
    handler = ("--handler", f"{HERE}:remember")
    # Without the number of partitions, the command cannot know whether all of the queue is meant.
    said = command("replay", *place.options, "--all", "--queue", "orders", *handler)
    assert (said.status, said.out) == (64, "")
    assert said.err == (
        "lanes: `lanes dead-letters replay` has --queue without --partitions, and there are dead letters of "
        "orders__p1; add --partitions NUMBER for all partitions of the queue, or --partitions 1; run "
        "`lanes dead-letters replay --help`\n"
    )
    assert len(ids(command, place)) == 3
    said = command("replay", *place.options, "--all", "--queue", "orders", "--partitions", "2", *handler)
    assert said.status == 0
    assert said.err.endswith("lanes: 2 replayed, 0 stay\n")
    assert ids(command, place) == [sent["other"].id]


def test_a_replay_of_some_partitions_counts_the_dead_letters_of_the_others(command: Command, place: Place) -> None:
    sent = {name: of(place, source=name, subject=name) for name in ("orders", "orders__p3", "orders__p03")}
    place.park(*sent.values())
    handler = ("--handler", f"{HERE}:remember")
    note = "lanes: left out: 1 dead letter(s) of orders__p3; raise --partitions to select all partitions of the queue\n"
    for done in ("lanes: 1 replayed, 0 stay\n", ": no dead letters of orders\n"):
        said = command("replay", *place.options, "--all", "--queue", "orders", "--partitions", "1", *handler)
        assert said.status == 0
        assert said.err.endswith(done + note)
    assert sorted(ids(command, place)) == sorted(sent[name].id for name in ("orders__p3", "orders__p03"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "--partitions", "1"], "has --partitions without --queue NAME; name the queue"),
        (["list", "--queue", "a", "--partitions", "0"], "--partitions=0: must be a whole number, 1 or more"),
        (["list", "--queue", ""], "--queue '': must not be empty"),
        (["replay", "0" * 32, "--queue", "a", "--to-origin"], "has IDs and --queue, but --queue selects from --all"),
    ],
)
def test_options_of_a_queue_that_contradict_are_refused(command: Command, arguments: list[str], words: str) -> None:
    said = command(*arguments, "--topic", "dead", "--server", "127.0.0.1:1")
    assert (said.status, said.out) == (64, "")
    assert words in said.err and said.err.count("\n") == 1


def test_an_empty_list_says_so(command: Command, place: Place) -> None:
    said = command("list", *place.options)
    assert (said.status, said.out) == (0, "")
    known = (
        "" if place.remembers else f"; stream {place.options[-1].removesuffix('.x')} captures it, and has no messages"
    )
    assert said.err.endswith(f": no dead letters{known}\n")


def test_an_empty_list_on_jetstream_names_the_subjects_that_have_messages(
    command: Command, nats_server: NatsServer
) -> None:
    place = JetStreamPlace(nats_server)
    place.park(of(place))
    *options, subject = place.options
    said = command("list", *options, subject.removesuffix("x") + "typo")
    stream = subject.removesuffix(".x")
    assert said.err.endswith(f"typo: no dead letters; stream {stream} captures it, and has messages of {subject}\n")
    place.delete()


def test_an_empty_list_on_postgresql_names_the_other_dead_letters(command: Command, postgres: PostgresServer) -> None:
    place = PostgresPlace(postgres)
    place.park(of(place))
    said = command("list", *place.options[:-1], "typo")
    assert (said.status, said.out) == (0, "")
    assert said.err == "lanes: typo: no dead letters; the table has dead letters of the names billing\n"
    replay = command("replay", "--all", *place.options[:-1], "typo", "--handler", f"{HERE}:remember")
    assert (replay.status, replay.err) == (said.status, said.err)
    place.delete()


def test_a_dead_letter_is_shown_without_its_payload_by_default(command: Command, place: Place) -> None:
    sent = of(place, key=KEY.encode(), value=VALUE.encode(), headers=(("x", HEADER.encode()),))
    place.park(sent)
    said = command("show", sent.id, *place.options)
    assert (said.status, said.err) == (0, "")
    assert "no such customer" in said.out
    assert said.out == "".join(f"{line.rstrip()}\n" for line in said.out.splitlines()), "no line is padded in a pipe"
    assert not any(canary in said.out for canary in (KEY, HEADER, VALUE))
    said = command("show", sent.id, *place.options, "--payload")
    assert all(canary in said.out for canary in (KEY, HEADER, VALUE))
    assert not any(canary in command("show", sent.id, *place.options, "--json").out for canary in (KEY, HEADER, VALUE))
    shown = json.loads(command("show", sent.id, *place.options, "--payload", "--json").out)
    assert base64.b64decode(shown["key"]) == KEY.encode()
    assert base64.b64decode(shown["value"]) == VALUE.encode()
    assert shown["headers"] == [["x", base64.b64encode(HEADER.encode()).decode()]]


def test_a_message_without_a_key_is_shown_so(command: Command, place: Place) -> None:
    sent = of(place, key=None)
    place.park(sent)
    shown = command("show", sent.id, *place.options)
    assert re.search(r"^ *key +none *$", shown.out, re.M), shown.out


def test_a_dead_letter_cannot_control_the_terminal(command: Command, place: Place) -> None:
    sent = of(
        place,
        key=HOSTILE.encode(),
        value=f"{HOSTILE}\n{HOSTILE}".encode(),
        headers=(("x", HOSTILE.encode()),),
        error_type="Value\u202eError",
        error_text=HOSTILE,
    )
    place.park(sent)
    for arguments in (
        ("list",),
        ("list", "--json"),
        ("show", sent.id),
        ("show", sent.id, "--payload"),
        ("show", sent.id, "--payload", "--json"),
        ("replay", sent.id, "--handler", f"{HERE}:refuse"),
    ):
        said = command(*arguments, *place.options)
        signs = set(said.out + said.err) - {"\n"}
        assert not [sign for sign in signs if not sign.isprintable()], arguments
        assert said.out
