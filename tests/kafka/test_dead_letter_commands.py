"""`lanes dead-letters` on both brokers: list, show, replay, publish and drop."""

from __future__ import annotations

import base64
import json

import pytest

from lanes.history.writer import key_hash
from tests.components import KafkaServer
from tests.kafka import dead_letters as handlers
from tests.kafka.dead_letter_places import HERE, Command, KafkaPlace, Place, Said, ids, of

KEY, HEADER, VALUE = "canary-key-5e1f", "canary-header-5e1f", "canary-value-5e1f"
HOSTILE = "\x1b[2J\x07[bold]\u202e:warning:"


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    handlers.SEEN.clear()


# --- list and show


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


def test_a_list_is_limited_and_says_so(command: Command, place: Place) -> None:
    place.park(*(of(place) for _ in range(20)))
    said = command("list", *place.options, "--json", "--limit", "18")
    assert len(said.out.splitlines()) == 18
    assert said.err == "lanes: there are more than 18; use --limit to show more of them\n"
    said = command("list", *place.options, "--json", "--limit", "20")
    assert (len(said.out.splitlines()), said.err) == (20, "")


def test_an_empty_list_says_so(command: Command, place: Place) -> None:
    said = command("list", *place.options)
    assert (said.status, said.out) == (0, "")
    assert said.err.endswith(": no dead letters\n")


def test_a_dead_letter_is_shown_without_its_payload_by_default(command: Command, place: Place) -> None:
    sent = of(place, key=KEY.encode(), value=VALUE.encode(), headers=(("x", HEADER.encode()),))
    place.park(sent)
    said = command("show", sent.id, *place.options)
    assert (said.status, said.err) == (0, "")
    assert "no such customer" in said.out
    assert not any(canary in said.out for canary in (KEY, HEADER, VALUE))
    said = command("show", sent.id, *place.options, "--payload")
    assert all(canary in said.out for canary in (KEY, HEADER, VALUE))
    assert not any(canary in command("show", sent.id, *place.options, "--json").out for canary in (KEY, HEADER, VALUE))
    shown = json.loads(command("show", sent.id, *place.options, "--payload", "--json").out)
    assert base64.b64decode(shown["key"]) == KEY.encode()
    assert base64.b64decode(shown["value"]) == VALUE.encode()
    assert shown["headers"] == [["x", base64.b64encode(HEADER.encode()).decode()]]


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


# --- replay and drop


@pytest.mark.parametrize("handler", ["remember", pytest.param("remember_too", marks=pytest.mark.slow)])
def test_a_replayed_dead_letter_leaves_the_list(command: Command, place: Place, handler: str) -> None:
    sent, other = of(place, value=b"payload of it"), of(place)
    place.park(sent, other)
    options = [*place.options, "--handler", f"{HERE}:{handler}", "--decode", f"{HERE}:first_word"]
    said = command("replay", sent.id, *options)
    assert (said.status, said.out) == (0, f"{sent.id}: replayed\n")
    assert "order against those is not claimed" in said.err
    assert [(sent.position, b"customer-42", b"payload of it", "payload")] == handlers.SEEN
    assert ids(command, place) == [other.id]
    said = command("replay", sent.id, *options)
    assert said.status == 0
    assert "already replayed" in said.out
    assert len(handlers.SEEN) == 1


def test_a_failed_replay_keeps_the_dead_letter(command: Command, place: Place) -> None:
    sent = of(place)
    place.park(sent)
    said = command("replay", sent.id, *place.options, "--handler", f"{HERE}:refuse")
    assert said.status == 3
    assert said.out == f"{sent.id}: stays: ValueError: still no such customer \\x1b[2J\n"
    assert "1 of 1 failed" in said.err
    assert ids(command, place) == [sent.id]


def test_all_are_replayed_and_failures_stay(command: Command, place: Place) -> None:
    sent = [of(place, key=b"same") for _ in range(3)]
    place.park(sent[0], of(place, key=b"same", value=b""), *sent[1:])
    said = command("replay", "--all", *place.options, "--handler", f"{HERE}:remember", "--decode", f"{HERE}:first_word")
    assert said.status == 3
    # Dead letters of one key, in order; the empty one has no first word.
    assert [seen[0] for seen in handlers.SEEN] == [one.position for one in sent]
    assert "stays: MessageError: decode failed" in said.out
    assert len(ids(command, place)) == 1


def test_a_dead_letter_is_republished_with_its_id(command: Command, place: Place) -> None:
    sent = of(place)
    place.park(sent)
    said = command("replay", sent.id, *place.options, "--to-origin")
    assert said.status == 0
    assert said.out.startswith(f"{sent.id}: replayed: it is ")
    assert "order against those is not claimed" in said.err
    assert "already replayed" in command("replay", sent.id, *place.options, "--to-origin").out
    ((value, headers),) = place.published()
    assert (value, headers["Lanes-Dead-Letter"], headers["color"]) == (b"payload", sent.id.encode(), b"red")
    assert ids(command, place) == []


@pytest.mark.slow
def test_a_cut_dead_letter_is_not_replayed(command: Command, kafka: KafkaServer) -> None:
    place = KafkaPlace(kafka)
    sent = of(place, value=bytes(range(256)) * 8_000)
    place.park(sent)
    for how in (["--to-origin"], ["--handler", f"{HERE}:remember"]):
        said = command("replay", sent.id, *place.options, *how)
        assert said.status == 3
        where = f"{place.origin}/3 position {sent.position}"
        assert f"bytes; take the message from {where}, then drop this one" in said.out
    assert handlers.SEEN == []
    assert ids(command, place) == [sent.id]
    place.delete()


def test_a_dead_letter_is_dropped_once(command: Command, place: Place) -> None:
    sent, other = of(place), of(place)
    place.park(sent, other)
    assert command("drop", sent.id, sent.id, *place.options) == (0, f"{sent.id}: dropped\n", "")
    assert ids(command, place) == [other.id]
    said = command("drop", sent.id, *place.options)
    assert said.status == 0
    assert "dropped" in said.out
    said = command("replay", sent.id, *place.options, "--handler", f"{HERE}:remember")
    assert (said.status, handlers.SEEN) == (0, [])
    assert "already" in said.out


def test_an_unknown_id_is_an_error_where_that_is_known(command: Command, place: Place) -> None:
    for arguments in (("drop",), ("show",), ("replay", "--to-origin")):
        said = command(*arguments, "f" * 32, *place.options)
        assert said.status == (3 if place.remembers else 0)
        assert ("no such dead letter" if place.remembers else "never here") in said.out + said.err


def became(said: Said) -> list[dict[str, object]]:
    return [json.loads(line) for line in said.out.splitlines()]


def test_outcomes_are_printed_as_json(command: Command, place: Place) -> None:
    good, bad, gone = of(place, value=b"good"), of(place, value=b""), of(place)
    place.park(good, bad, gone)
    options = [*place.options, "--json"]
    assert became(command("drop", gone.id, *options)) == [
        {"id": gone.id, "state": "dropped", "done": True, "said": "dropped"}
    ]
    handle = ["--handler", f"{HERE}:remember", "--decode", f"{HERE}:first_word"]
    said = command("replay", good.id, bad.id, gone.id, "f" * 32, *options, *handle)
    assert said.status == 3
    replayed, stays, dropped, unknown = became(said)
    assert replayed == {"id": good.id, "state": "replayed", "done": True, "said": "replayed"}
    assert (stays["id"], stays["state"], stays["done"]) == (bad.id, "stays", False)
    assert str(stays["said"]).startswith("stays: MessageError: decode failed")
    # A stream keeps no trace of a dead letter that is gone.
    states = ("dropped", "unknown") if place.remembers else ("gone", "gone")
    assert [(one["id"], one["state"]) for one in (dropped, unknown)] == [(gone.id, states[0]), ("f" * 32, states[1])]
    assert [one["done"] for one in (dropped, unknown)] == [True, not place.remembers]
    assert f"{1 + place.remembers} of 4 failed" in said.err
    (again,) = became(command("replay", good.id, *options, "--to-origin"))
    assert (again["state"], again["done"]) == ("replayed" if place.remembers else "gone", True)
    assert ids(command, place) == [bad.id]
    assert place.published() == []
