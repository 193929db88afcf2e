"""`lanes dead-letters replay` handles or republishes each dead letter once, on each backend."""

from __future__ import annotations

import pytest

from tests.backends import dead_letter_handlers as handlers
from tests.backends.dead_letter_places import HERE, Command, KafkaPlace, Place, PostgresPlace, ids, of
from tests.components import KafkaServer


@pytest.mark.parametrize("handler", ["remember", pytest.param("remember_too", marks=pytest.mark.slow)])
def test_a_replayed_dead_letter_leaves_the_list(command: Command, place: Place, handler: str) -> None:
    sent, other = of(place, value=b"payload of it"), of(place)
    place.park(sent, other)
    options = [*place.options, "--handler", f"{HERE}:{handler}", "--decode", f"{HERE}:first_word"]
    said = command("replay", sent.id, *options)
    assert (said.status, said.out) == (0, f"{sent.id}: replayed\n")
    assert "the order within a key is not kept" in said.err
    assert [(sent.position, b"customer-42", b"payload of it", "payload")] == handlers.SEEN
    assert ids(command, place) == [other.id]
    said = command("replay", sent.id, *options)
    assert said.status == 0
    assert "already replayed" in said.out
    assert "the order within a key" not in said.err
    assert len(handlers.SEEN) == 1


@pytest.mark.parametrize("handler", ["remember_data", "remember_data_soon"])
def test_a_handler_that_needs_decode_is_one_line_for_all_dead_letters(
    command: Command, place: Place, handler: str
) -> None:
    sent = [of(place, value=b"payload of it") for _ in range(3)]
    place.park(*sent)
    said = command("replay", "--all", *place.options, "--handler", f"{HERE}:{handler}")
    assert (said.status, said.out) == (64, "")
    last = said.err.splitlines()[-1]
    assert last == (
        f"lanes: `lanes dead-letters replay` needs --decode MODULE:FUNCTION, because {HERE}:{handler} reads "
        "message.data; run `lanes dead-letters replay --help`"
    )
    assert [line for line in said.err.splitlines() if "order within a key" not in line] == [last]
    assert sorted(ids(command, place)) == sorted(one.id for one in sent)
    options = ["--handler", f"{HERE}:{handler}", "--decode", f"{HERE}:first_word"]
    assert command("replay", "--all", *place.options, *options).status == 0
    assert [seen[-1] for seen in handlers.SEEN] == ["payload"] * 3
    # An attribute of the same name of another object is an error of the handler.
    other = of(place)
    place.park(other)
    assert "stays: AttributeError" in command("replay", other.id, *place.options, "--handler", f"{HERE}:other_data").out


def test_a_failed_replay_keeps_the_dead_letter(command: Command, place: Place) -> None:
    sent = of(place)
    place.park(sent)
    said = command("replay", sent.id, *place.options, "--handler", f"{HERE}:refuse")
    assert said.status == 3
    assert said.out == f"{sent.id}: stays: ValueError: still no such customer \\x1b[2J\n"
    assert said.err.endswith("lanes: 0 replayed, 1 stay\n")
    # One line says how the command ended.
    assert "failed" not in said.err
    assert ids(command, place) == [sent.id]


def test_all_dead_letters_are_replayed_and_failed_ones_stay(command: Command, place: Place) -> None:
    sent = [of(place, key=b"same") for _ in range(3)]
    place.park(sent[0], of(place, key=b"same", value=b""), *sent[1:])
    said = command("replay", "--all", *place.options, "--handler", f"{HERE}:remember", "--decode", f"{HERE}:first_word")
    assert said.status == 3
    # Dead letters of one key, in order; the empty one has no first word.
    assert [seen[0] for seen in handlers.SEEN] == [one.position for one in sent]
    assert "stays: MessageError: decode failed" in said.out
    assert said.err.endswith("lanes: 3 replayed, 1 stay\n")
    assert len(ids(command, place)) == 1


def test_a_dead_letter_is_republished_with_its_id(command: Command, place: Place) -> None:
    sent = of(place)
    place.park(sent)
    said = command("replay", sent.id, *place.options, "--to-origin")
    assert said.status == 0
    assert said.out.startswith(f"{sent.id}: replayed: the message is now ")
    # The server gives a position at the COMMIT only, so the log has no other place for the message yet.
    assert (" now at the end of log " in said.out) == isinstance(place, PostgresPlace)
    assert "the order within a key is not kept" in said.err
    assert "already replayed" in command("replay", sent.id, *place.options, "--to-origin").out
    said = command("replay", "--all", *place.options, "--to-origin")
    assert (said.status, said.out) == (0, "")
    assert ": no dead letters" in said.err and said.err.count("\n") == 1
    ((value, headers),) = place.published()
    assert (value, headers["Lanes-Dead-Letter"], headers["color"]) == (b"payload", sent.id.encode(), b"red")
    assert ids(command, place) == []


def test_a_dead_letter_of_another_broker_is_not_republished(command: Command, place: Place) -> None:
    """The dead letters may be on another broker than the origin, and that broker may have an equal name."""
    own = {"source": place.source, "system": place.system}
    other = {"kafka": "nats", "nats": "postgresql", "postgresql": "kafka"}[place.system]
    here = of(place, **own, incarnation=place.incarnation())
    elsewhere = of(place, **own, incarnation="2020-02-02T02:02:02.02Z")
    foreign = of(place, source=place.source, system=other)
    place.park(here, elsewhere, foreign)
    said = command("replay", "--all", *place.options, "--to-origin")
    assert said.status == 3
    lines = dict(line.split(": ", 1) for line in said.out.splitlines())
    assert lines[here.id].startswith("replayed: the message is now ")
    remedy = ". Replay the dead letter with --handler"
    assert (
        f"its origin '{place.source}/3' is on '{other}', but --to-origin publishes only to the server of the dead "
        "letters, " in lines[foreign.id]
    )
    assert f" {place.system}{remedy}; or publish the message yourself, then drop the dead letter" in lines[foreign.id]
    assert " '2020-02-02T02:02:02.02Z', and here the " in lines[elsewhere.id]
    assert (
        f" is '{here.incarnation}', so the cluster differs or the origin was recreated{remedy}, or "
        in (lines[elsewhere.id])
    )
    assert said.err.endswith("lanes: 1 replayed, 2 stay\n")
    assert [headers["Lanes-Dead-Letter"] for _, headers in place.published()] == [here.id.encode()]
    # The name alone decides if the user says so, and the kind of the broker always counts.
    said = command("replay", "--all", *place.options, "--to-origin", "--new-origin")
    assert (said.status, said.err.endswith("lanes: 1 replayed, 1 stay\n")) == (3, True)
    assert [headers["Lanes-Dead-Letter"] for _, headers in place.published()][1:] == [elsewhere.id.encode()]
    assert ids(command, place) == [foreign.id]


@pytest.mark.parametrize("place", ["kafka", "jetstream"], indirect=True)
def test_a_dead_letter_without_its_headers_is_not_replayed(command: Command, place: Place) -> None:
    """A handler would miss the headers, and a message without them would be another message."""
    sent = of(place, value=b"payload of it", headers=(("color", b"x" * 2_000_000),))
    place.park(sent)
    for how in (["--to-origin"], ["--handler", f"{HERE}:remember"]):
        said = command("replay", sent.id, *place.options, *how)
        assert said.status == 3
        where = f"{place.origin}/3 position {sent.position}"
        assert said.out == (
            f"{sent.id}: stays: its headers were cut off, because the message was too large; read the message from "
            f"{where}, then drop the dead letter\n"
        )
    assert handlers.SEEN == []
    assert ids(command, place) == [sent.id]
    for payload in ([], ["--payload"]):
        shown = [line.split() for line in command("show", sent.id, *place.options, *payload).out.splitlines()]
        assert ["value", "13", "bytes"] in shown
        assert ["headers", "removed,", "because", "the", "dead", "letter", "was", "too", "large"] in shown


@pytest.mark.slow
def test_a_cut_dead_letter_is_not_replayed(command: Command, kafka: KafkaServer) -> None:
    place = KafkaPlace(kafka)
    sent = of(place, value=bytes(range(256)) * 8_000)
    place.park(sent)
    for how in (["--to-origin"], ["--handler", f"{HERE}:remember"]):
        said = command("replay", sent.id, *place.options, *how)
        assert said.status == 3
        where = f"{place.origin}/3 position {sent.position}"
        assert f"bytes; read the message from {where}, then drop the dead letter" in said.out
    assert handlers.SEEN == []
    assert ids(command, place) == [sent.id]
    place.delete()
