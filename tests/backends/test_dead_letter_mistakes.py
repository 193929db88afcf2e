"""A mistake in a `lanes dead-letters` command prints one line with the remedy, on each backend."""

from __future__ import annotations

import json
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lanes.cli import kit
from lanes.cli.dead_letters import checked
from lanes.cli.views import moment
from lanes.dead_letter import printable
from tests.backends import dead_letter_handlers as handlers
from tests.backends.dead_letter_places import HERE, Command, KafkaPlace, Place, ids, of
from tests.components import KafkaServer, NatsServer

KAFKA = ("--server", "127.0.0.1:9", "--topic", "dead")
ID = "0" * 32


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (
            ["list"],
            64,
            "needs one of --topic NAME (Kafka), --subject NAME (JetStream) and --name NAME (PostgreSQL)",
        ),
        (
            ["list", "--topic", "a", "--subject", "b"],
            64,
            "has --topic and --subject, but dead letters are in one place; keep --topic for Kafka, --subject for",
        ),
        (["list", "--topic", "a", "--name", "b"], 64, "has --topic and --name, but dead letters are in one place"),
        (["list", "--subject", "b", "--server", "http://x:4222"], 64, "lanes: --server: the scheme http:// is not"),
        (["list", "--subject", "b", "--server", "nats://u:canary@"], 64, "lanes: --server: the URL has no host"),
        (["list", "--subject", "de ad", "--server", "x"], 64, "lanes: --subject 'de ad' is empty, or has blanks"),
        (["list", "--subject", "nats://x", "--server", "x"], 64, "has the address of a server as --subject; pass"),
        (["list", "--topic", "nats://x", "--server", "x"], 64, "has the address of a server as --topic; pass"),
        (["list", "--name", "b", "--server", "x"], 64, "has --name with --server, --config or -X"),
        (["list", "--topic", "a", "--server", "x", "--dsn", "y"], 64, "add --name NAME"),
        (["list", "--subject", "a", "--server", "x", "--schema", "y"], 64, "add --name NAME"),
        (
            ["list", "--dsn", "parcels", "--name", "postgresql://u:canary@h/db"],
            64,
            "has the address of a server as --name; pass the address by --dsn and a name by --name",
        ),
        (["list", "--dsn", "parcels", "--name", "dbname=d password=canary"], 64, "pass the address by --dsn"),
        (["list", "--dsn", "postgresql://host/x", "--name", "x" * 201], 64, "must be a str of 1 to 200 characters"),
        (
            ["list", "--name", "b", "--dsn", "postgresql://me:canary%zz@host/x"],
            64,
            "correct the connection string, such as",
        ),
        (
            ["list", "--name", "b", "--dsn", "https://me:canary@host/x"],
            64,
            ("the scheme https:// is not a scheme of PostgreSQL"),
        ),
        (["list", "--subject", "b"], 64, "`lanes dead-letters list` needs --server ADDRESS of a NATS server"),
        (["list", "--subject", "b", "--server", "x", "-X", "a=b"], 64, "has --subject with --config or -X"),
        (["lst"], 64, "run `lanes dead-letters --help`"),
        (["replay", "--nonsense"], 64, "run `lanes dead-letters replay --help`"),
        (["drop", "--subject", "b"], 64, "needs ID; run `lanes dead-letters drop --help`"),
        (["list", "--topic", "dead"], 64, "`lanes dead-letters list` needs --server HOST:PORT of a Kafka broker"),
        (["list", "--topic", "de ad", "--server", "x"], 64, "lanes: --topic 'de ad': must be 1 to 249 letters"),
        (["list", *KAFKA, "--limit", "0"], 64, "--limit"),
        (["list", *KAFKA, "--config", "/no/such/file"], 3, "/no/such/file"),
        (["list", *KAFKA, "-X", "nonsense"], 64, "-X number"),
        (["show", "xyz", *KAFKA], 64, "ID 'xyz': must be 32 hex digits"),
        (["drop", *KAFKA], 64, "ID"),
        (["replay", *KAFKA, "--to-origin"], 64, "needs either IDs or --all"),
        (["replay", ID, "--all", *KAFKA, "--to-origin"], 64, "needs either IDs or --all"),
        (["replay", ID, *KAFKA], 64, "needs --handler MODULE:FUNCTION, or --to-origin"),
        (["replay", ID, *KAFKA, "--to-origin", "--handler", "a:b"], 64, "--handler, but --to-origin publishes"),
        (["replay", ID, *KAFKA, "--to-origin", "--decode", "a:b"], 64, "--decode, but --to-origin publishes"),
        (["list", "--topic", "b", "--server", "nats://u:canary@x:4222"], 64, "of a NATS server; use --subject NAME"),
        (["replay", ID, *KAFKA, "--new-origin", "--handler", "a:b"], 64, "has --new-origin, which is for --to-origin"),
        (["replay", ID, *KAFKA, "--handler", "json"], 64, "--handler 'json': must be package.module:function"),
        (["replay", ID, *KAFKA, "--handler", "a.py:f"], 64, "must be package.module:function, without .py"),
        (["replay", ID, *KAFKA, "--handler", "no_such_module:f"], 3, "ModuleNotFoundError"),
        (["replay", ID, *KAFKA, "--handler", f"{HERE}:no_such"], 3, "AttributeError"),
        (["replay", ID, *KAFKA, "--handler", f"{HERE}:NOT_A_FUNCTION"], 3, "is a int, not a function"),
        (["replay", ID, *KAFKA, "--handler", f"{HERE}:remember_all"], 64, "needs a handler of one message, but"),
        (["replay", ID, *KAFKA, "--handler", f"{HERE}:with_database"], 3, "takes message, database, and cannot be"),
        (
            ["replay", ID, *KAFKA, "--handler", f"{HERE}:remember", "--decode", f"{HERE}:remember"],
            3,
            "--decode: decode=remember is async",
        ),
        (
            ["replay", ID, *KAFKA, "--handler", f"{HERE}:remember", "--decode", "json:loads"],
            3,
            "decode gets the Message: name a function of your own that returns loads(message.value)",
        ),
    ],
)
def test_the_command_prints_one_line_about_a_wrong_argument(
    command: Command, arguments: list[str], status: int, words: str
) -> None:
    said = command(*arguments)
    assert (said.status, said.out) == (status, "")
    assert said.err.startswith("lanes: ")
    assert words in said.err
    assert said.err.count("\n") == 1
    assert "canary" not in said.err


@pytest.mark.parametrize("option", ["--handler", "--decode"])
@pytest.mark.parametrize(
    "start",
    [
        "lanes.main(source, ship)",
        "anyio.run(lanes.run, source, ship)",
        "anyio.run(lanes.serve, lanes.Consumer(source, ship))",
        "anyio.run(lanes.Consumer(source, ship).run)",
    ],
)
def test_a_module_that_starts_its_consumer_without_a_guard_ends_the_command(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, option: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unguarded", raising=False)
    (tmp_path / "unguarded.py").write_text(
        "import anyio, lanes, memsource\n\n"
        "class Source(memsource.MemorySource):\n"
        "    async def open(self) -> lanes.SourceTraits:\n        raise RuntimeError('it was opened')\n\n"
        "async def ship(message: lanes.Message) -> None:\n    raise RuntimeError('a live message')\n\n"
        f"source = Source(memsource.MemoryBroker())\n{start}\n"
    )
    options = ("--handler", f"{HERE}:remember", "--decode") if option == "--decode" else ("--handler",)
    said = command("replay", ID, *KAFKA, *options, "unguarded:ship")
    assert (said.status, said.out) == (3, "")
    assert said.err == (
        f"lanes: {option} 'unguarded:ship': the import of unguarded starts a consumer, but this command needs "
        'only the function; start the consumer below if __name__ == "__main__":\n'
    )


def test_an_unreachable_broker_prints_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_kafka.broker.TOPIC_DEADLINE", 1.0)
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.3)
    for options in (
        KAFKA,
        ("--server", "nats://u:canary@127.0.0.1:9", "--subject", "dead"),
        ("--dsn", "postgresql://u:canary@127.0.0.1:9/x", "--name", "dead"),
    ):
        said = command("list", *options)
        assert (said.status, said.out, said.err.count("\n")) == (3, "", 1)
        assert "127.0.0.1" in said.err and "9" in said.err
        assert "canary" not in said.err
        # The user wrote this option, and no setting of a client.
        assert "bootstrap.servers" not in said.err


def test_a_kafka_command_at_a_nats_server_names_the_other_server(
    command: Command, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_kafka.broker.TOPIC_DEADLINE", 1.0)
    said = command("list", "--server", nats_server.url.removeprefix("nats://"), "--topic", "dead")
    assert said.status == 3
    assert "the answer begins with the text 'INFO', so a NATS server and no Kafka broker listens there" in said.err
    assert "receive.message.max.bytes" not in said.err


def test_a_nats_command_at_another_server_says_that_something_listens(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said = command("list", "--server", address, "--subject", "dead")
    assert said.status == 3
    assert f"{address} accepts connections, but did not answer like a NATS server" in said.err


def test_a_command_that_waits_for_the_server_prints_this_on_stderr(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes.cli.kit._SILENT_FOR", 0.2)
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 1.0)
    said = command("list", "--json", "--server", "nats://u:canary@127.0.0.1:9", "--subject", "dead")
    assert (said.status, said.out) == (3, "")
    assert said.err.startswith("lanes: waiting for the NATS server at 127.0.0.1:9\n")
    assert "canary" not in said.err


def test_an_invalid_handler_ends_the_replay_of_dead_letters(command: Command, place: Place) -> None:
    sent = of(place)
    place.park(sent)
    said = command("replay", sent.id, *place.options, "--handler", f"{HERE}:wrong")
    assert said.status == 3
    assert "declare the handler" in said.err
    assert ids(command, place) == [sent.id]


def test_a_handler_of_batches_ends_the_replay_of_dead_letters(command: Command, place: Place) -> None:
    sent = of(place)
    place.park(sent)
    said = command("replay", sent.id, *place.options, "--handler", f"{HERE}:remember_each")
    assert said.status == 64
    assert f"but {HERE}:remember_each takes a list of messages; name a function that passes [message] to" in said.err
    assert "the order within a key" not in said.err, "nothing was replayed"
    assert ids(command, place) == [sent.id]


@pytest.mark.parametrize(
    ("missing", "options", "extra"),
    [
        ("confluent_kafka", KAFKA, "cli,kafka"),
        ("nats", ("--server", "x", "--subject", "dead"), "cli,jetstream"),
        ("psycopg", ("--name", "dead"), "cli,postgres"),
    ],
)
def test_a_missing_package_prints_one_line_with_the_remedy(
    command: Command, monkeypatch: pytest.MonkeyPatch, missing: str, options: tuple[str, ...], extra: str
) -> None:
    monkeypatch.setattr(kit, "find_spec", lambda name: None if name == missing else find_spec(name))
    said = command("list", *options)
    assert said.status == 3
    assert f"needs {missing}: pip install '.[{extra}]' in the checkout of lanes" in said.err


def test_the_dead_letter_command_reads_the_settings_of_kafka_from_a_file(
    command: Command, kafka: KafkaServer, tmp_path: Path
) -> None:
    place = KafkaPlace(kafka)
    sent = of(place)
    place.park(sent)
    config = tmp_path / "client.properties"
    config.write_text(f"bootstrap.servers={kafka.url}\ngroup.id=g\nauto.offset.reset=latest\n")
    said = command("list", "--config", str(config), "--topic", place.options[-1], "--json")
    assert [json.loads(line)["id"] for line in said.out.splitlines()] == [sent.id]
    place.delete()


def test_an_id_that_is_given_twice_counts_once() -> None:
    assert checked(["a" * 32, "b" * 32, "a" * 32]) == ["a" * 32, "b" * 32]
    for wrong in ("A" * 32, "a" * 31, "a" * 33, "\u0661" * 32, f"{'a' * 32}\n"):
        with pytest.raises(SystemExit):
            checked([wrong])


def test_control_characters_of_a_dead_letter_are_escaped() -> None:
    assert printable("käse [x] \\ \x1b\n\u202e\ud800") == "käse [x] \\ \\x1b\\n\\u202e\\ud800"


def test_the_dead_letter_command_prints_times_in_utc_to_the_second() -> None:
    assert moment(0.0) == "1970-01-01 00:00:00Z"
    assert moment(999_999_999_999.0) == "999999999999 s"


def test_the_handler_is_imported_from_the_named_module() -> None:
    assert sys.modules[HERE] is handlers
