"""``lanes dead-letters list`` and ``show`` print no payload unless it is requested, on both brokers."""

from __future__ import annotations

import base64
import json

import pytest

from lanes.history.writer import key_hash
from tests.backends.dead_letter_places import HERE, Command, Place, of

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
