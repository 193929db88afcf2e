"""The starter of a real Kafka starts and ends brokers, removes their files, and names each fault."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import threading
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)

from tests.components import ComponentError, KafkaServer, MissingComponent, kafka_installation, kafka_server, wait_until
from tests.components.kafka_properties import Ports, choose_ports
from tests.conftest import KafkaFactory, Spawn, first_line, is_free, is_gone, warm_groups
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import QUIET, produce

pytestmark = pytest.mark.usefixtures("kafka_prepared")

OWNER = """
import json
from tests.components import KafkaServer, wait_until
server = KafkaServer()
server.start()
print(json.dumps({"pid": server.pid, "url": server.url, "folder": str(server.folder)}), flush=True)
# No single blocking call, because Python would handle a signal that arrives just before the call only after it.
wait_until(lambda: False, "a signal", seconds=60)
"""


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def allow(server: KafkaServer, user: str, kind: ResourceType, name: str) -> None:
    """Allow this user to read."""
    admin = AdminClient({**QUIET, **server.config("admin")})
    rule = AclBinding(
        kind, name, ResourcePatternType.LITERAL, f"User:{user}", "*", AclOperation.READ, AclPermissionType.ALLOW
    )
    admin.create_acls([rule])[rule].result(10)


def next_message(consumer: Consumer) -> Message:
    message = None
    while message is None:
        message = consumer.poll(0.1)
    return message


def test_a_started_broker_answers_and_leaves_nothing(fresh_kafka: KafkaFactory, temporary: Path) -> None:
    server = fresh_kafka(properties={"message.max.bytes": 12_345_678})
    folder, pid, url = server.folder, server.pid, server.url
    assert server.admin_url == url
    assert json.loads((folder / "run" / "state.json").read_text()) == {"component": "kafka", "pid": pid, "url": url}
    admin = AdminClient({**QUIET, **server.config()})
    broker = ConfigResource(ResourceType.BROKER, "1")
    settings = admin.describe_configs([broker])[broker].result(10)
    assert list(Path("/tmp").glob(f"hsperfdata_*/{pid}")) == [], "this file would remain after a kill"
    assert settings["message.max.bytes"].value == "12345678"
    assert settings["auto.create.topics.enable"].value == "false"

    server.start()
    assert (server.pid, server.url) == (pid, url)

    server.pause()
    with pytest.raises(KafkaException):
        admin.list_topics(timeout=0.5)
    server.start()
    assert server.pid == pid
    assert admin.list_topics(timeout=10).brokers.keys() == {1}

    server.stop()
    assert is_gone(pid) and is_free(port_of(url)) and list(temporary.iterdir()) == []
    server.stop()
    with pytest.raises(ComponentError, match=r"call start\(\)"):
        _ = server.url


def test_a_killed_broker_comes_back_with_port_messages_and_commits(fresh_kafka: KafkaFactory, topic: MakeTopic) -> None:
    server = fresh_kafka()
    url, pid = server.url, server.pid
    events = topic(2, on=server)
    sent = produce(events, 500)
    assert [sum(one.partition == number for one in sent) for number in (0, 1)] == events.ends()
    # After an answer the coordinator is loaded and knows the group.
    assert events.committed("g") == [None, None]
    consumer = Consumer({**QUIET, "bootstrap.servers": url, "group.id": "g"})
    consumer.commit(offsets=[TopicPartition(events.name, 1, 7)], asynchronous=False)
    consumer.close()

    server.pause()  # a paused broker is killed as well
    server.kill()
    assert is_gone(pid) and is_free(port_of(url)) and not server.alive
    with pytest.raises(ComponentError, match="not running"):
        server.kill()

    with socket.create_server(("127.0.0.1", port_of(url))), pytest.raises(ComponentError, match="is taken"):
        server.start()
    assert not server.alive

    server.start()
    assert server.url == url and server.pid != pid
    assert sum(events.ends()) == 500
    warm_groups(server)
    assert events.committed("g") == [None, 7]


def test_a_first_start_finds_another_port(
    fresh_kafka: KafkaFactory, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken: int = holder.getsockname()[1]
        chosen = [Ports(taken, taken, choose_ports(login=False).controller), choose_ports(login=False)]
        monkeypatch.setattr(kafka_server, "choose_ports", lambda *, login: chosen.pop(0))
        server = fresh_kafka()
        assert port_of(server.url) != taken and chosen == []
    assert list(temporary.iterdir()) == [server.folder]


def test_clients_log_in_and_may_do_only_what_acls_allow(fresh_kafka: KafkaFactory, topic: MakeTopic) -> None:
    server = fresh_kafka(users={"admin": "verysecret1", "alice": "verysecret2"})
    assert "verysecret" not in repr(server)
    assert stat.S_IMODE((server.folder / "server.properties").stat().st_mode) == 0o600
    assert server.url != server.admin_url
    events = topic(on=server)

    errors: list[KafkaError] = []
    wrong = {"sasl.password": "wrong", "error_cb": errors.append}
    stranger = Producer({**QUIET, **server.config("alice"), **wrong})
    wait_until(lambda: bool(stranger.poll(0) or errors), "the broker to refuse the client")
    assert errors[0].code() == KafkaError._AUTHENTICATION

    refused: list[KafkaError | None] = []
    writer = Producer({**QUIET, **server.config("alice")})
    writer.produce(events.name, b"not allowed", on_delivery=lambda error, _: refused.append(error))
    writer.flush(20)
    assert [error and error.code() for error in refused] == [KafkaError.TOPIC_AUTHORIZATION_FAILED]

    reader = Consumer({**QUIET, **server.config("alice"), "group.id": "g", "auto.offset.reset": "earliest"})
    reader.subscribe([events.name])
    error = next_message(reader).error()
    assert error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED

    produce(events, 1)
    allow(server, "alice", ResourceType.TOPIC, events.name)
    allow(server, "alice", ResourceType.GROUP, "g")
    message = next_message(reader)
    assert (message.error(), message.value()) == (None, b"0")
    reader.close()


def test_a_broker_that_does_not_start_shows_its_error(temporary: Path) -> None:
    with pytest.raises(ComponentError, match=r"ended while starting: .*Invalid value nonsense .*log\.segment\.bytes"):
        KafkaServer(properties={"log.segment.bytes": "nonsense"}).start()
    assert list(temporary.iterdir()) == []


def test_reserved_properties_are_not_overridden(temporary: Path) -> None:
    with pytest.raises(ValueError, match=r"property log\.dirs is set by the starter"):
        KafkaServer(properties={"log.dirs": "/tmp"}).start()
    with pytest.raises(ValueError, match="user 'alice': the name and the password") as refused:
        KafkaServer(users={"alice": 'very"secret'}).start()
    assert "secret" not in str(refused.value)
    with pytest.raises(TypeError, match="arguments"):
        KafkaServer(arguments="-Xmx1g")
    assert list(temporary.iterdir()) == []


def test_a_folder_in_use_is_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    guest = KafkaServer(kafka.folder)
    with pytest.raises(ComponentError, match="runs in"):
        guest.start()
    # The guest has neither ended the broker nor removed its files.
    assert AdminClient({**QUIET, **kafka.config()}).list_topics(timeout=10).brokers.keys() == {1}
    assert (kafka.folder / "data").exists()
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(ComponentError, match="is not empty"):
        KafkaServer(tmp_path).start()
    assert (tmp_path / "thesis.txt").exists()


def test_a_broker_ends_with_its_owner(spawn: Spawn, temporary: Path) -> None:
    owner = spawn("-c", OWNER)
    server = json.loads(first_line(owner))
    assert list(temporary.iterdir()) == [Path(server["folder"])]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: is_gone(server["pid"]), "the broker to end")
    wait_until(lambda: not list(temporary.iterdir()), "its folder to be removed")
    assert is_free(port_of(server["url"]))


def test_a_command_gets_the_addresses_of_both_brokers(spawn: Spawn, temporary: Path, nats_server: object) -> None:
    script = 'echo "{kafka} $KAFKA_URL {nats} $NATS_URL"'
    runner = spawn("-m", "tests.components", "run", "kafka", "nats", "--", "sh", "-c", script)
    output, errors = runner.communicate()
    assert (runner.returncode, errors) == (0, "")
    kafka, inherited, nats, also_inherited = output.split()
    assert kafka == inherited and nats == also_inherited
    assert is_free(port_of(kafka)) and is_free(port_of(nats))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("topics", [1, 3])
def test_produced_messages_are_where_they_are_said_to_be(topic: MakeTopic, topics: int) -> None:
    for events in [topic(4) for _ in range(topics)]:
        sent = produce(events, 40, keys=[b"a", b"b", None], partition=2)
        assert sent == [(2, number, [b"a", b"b", None][number % 3]) for number in range(40)]
        assert events.ends() == [0, 0, 40, 0]


class TestInstallation:
    """The installation that a broker runs from."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        cache = tmp_path / "cache"
        monkeypatch.setattr(kafka_installation, "CACHE", cache)
        return cache

    def maven(self, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        """Put a fake Maven first on PATH."""
        program = folder / "bin" / "mvn"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    def java(self, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        """Set JAVA_HOME to a fake Java."""
        program = folder / "home" / "bin" / "java"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("JAVA_HOME", str(folder / "home"))

    def startup_error(self) -> str:
        with pytest.raises(MissingComponent) as missing:
            KafkaServer().prepare()
        assert "\n" not in str(missing.value)
        return str(missing.value)

    def test_a_missing_java_is_one_clear_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert "apt install default-jre-headless maven" in self.startup_error()

    def test_a_missing_maven_is_one_clear_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.java(tmp_path, monkeypatch, 'echo openjdk version \\"21.0.1\\" >&2')
        monkeypatch.setenv("PATH", str(tmp_path))
        refusal = self.startup_error()
        assert "no mvn on PATH" in refusal and "apt install default-jre-headless maven" in refusal

    @pytest.mark.parametrize(
        ("script", "said"),
        [
            ('echo openjdk version \\"11.0.2\\" >&2', "needs Java 17 or newer"),
            ('echo java version \\"1.8.0_402\\" >&2', "is 8:"),
            ("echo no runtime; exit 1", "does not run"),
        ],
    )
    def test_an_unusable_java_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
    ) -> None:
        self.java(tmp_path, monkeypatch, script)
        refusal = self.startup_error()
        assert said in refusal and str(tmp_path / "home" / "bin" / "java") in refusal

    def test_missing_jars_are_named_and_fetched_again(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The fake Maven fails after it has written one jar.
        script = (
            'for last; do :; done; d="${last#*=}"; mkdir -p "$d"; echo x >"$d/a.jar"; echo "[ERROR] no route"; exit 1'
        )
        self.maven(tmp_path, monkeypatch, script)
        for _ in range(2):
            refusal = self.startup_error()
            assert "no route" in refusal and "settings.xml" in refusal
        assert list(cache.rglob("a.jar")) != [] and list(cache.rglob("ready")) == []

    def test_concurrent_installations_run_once(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        made: list[Path] = []
        inside, go_on = threading.Event(), threading.Event()
        said = ""

        def make(installation: object, java: str, folder: Path) -> None:
            made.append(folder)
            folder.mkdir(parents=True, exist_ok=True)
            inside.set()
            go_on.wait()

        def second_is_there() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return "waiting for another set-up" in said or len(made) > 1

        monkeypatch.setattr(kafka_installation, "_make", make)
        threads = [threading.Thread(target=kafka_installation.install) for _ in range(2)]
        try:
            threads[0].start()
            inside.wait()
            threads[1].start()
            wait_until(second_is_there, "the second set-up to wait")
        finally:
            go_on.set()
            for thread in threads:
                thread.join()
        assert len(made) == 1 and (made[0] / "ready").is_file()
