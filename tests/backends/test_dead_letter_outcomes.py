"""`lanes dead-letters drop`, unknown ids, and the outcomes of all commands as JSON, on each backend."""

from __future__ import annotations

import json

from tests.backends import dead_letter_handlers as handlers
from tests.backends.dead_letter_places import HERE, Command, Place, Said, ids, of


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


def test_an_unknown_id_is_an_error_unless_the_stream_has_lost_messages(command: Command, place: Place) -> None:
    sent = of(place)
    place.park(sent)
    unknown = [("drop",), ("show",), ("replay", "--to-origin")]
    for arguments in unknown:
        said = command(*arguments, "f" * 32, *place.options)
        assert (said.status, "no such dead letter" in said.out + said.err) == (3, True)
    assert command("drop", sent.id, *place.options).status == 0
    for arguments in unknown:
        said = command(*arguments, "f" * 32, *place.options)
        assert said.status == (3 if place.remembers else 0)
        assert ("no such dead letter" if place.remembers else "never here") in said.out + said.err


def became(said: Said) -> list[dict[str, object]]:
    return [json.loads(line) for line in said.out.splitlines()]


def test_the_json_option_prints_the_outcome_of_each_dead_letter(command: Command, place: Place) -> None:
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
    assert str(stays["said"]).endswith(": correct --decode, or the producer of such messages")
    # A stream keeps no trace of a deleted dead letter.
    states = ("dropped", "unknown") if place.remembers else ("gone", "gone")
    assert [(one["id"], one["state"]) for one in (dropped, unknown)] == [(gone.id, states[0]), ("f" * 32, states[1])]
    assert [one["done"] for one in (dropped, unknown)] == [True, not place.remembers]
    assert said.err.endswith(f"lanes: 1 replayed, 1 stay{', 1 not found' if place.remembers else ''}\n")
    (again,) = became(command("replay", good.id, *options, "--to-origin"))
    assert (again["state"], again["done"]) == ("replayed" if place.remembers else "gone", True)
    assert ids(command, place) == [bad.id]
    assert place.published() == []
