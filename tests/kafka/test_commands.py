"""The output of the Kafka commands; a mistake prints one line without a secret."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from itertools import filterfalse
from pathlib import Path

import pytest

from lanes.cli import app as cli
from lanes.cli import kit
from lanes.cli.doctor import Check
from lanes_kafka.cli import commands
from lanes_kafka.partitioners import crc32_partition, murmur2_partition
from tests.components import KafkaServer
from tests.kafka.conftest import MakeTopic

PASSWORD = "canary5e1f"

Command = Callable[..., tuple[object, str, str]]


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    # A slow broker is no subject of these tests.
    monkeypatch.setattr(kit, "_SILENT_FOR", 3_600.0)

    def command(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["lanes", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return command


def rows(said: tuple[object, str, str]) -> list[list[str]]:
    """The cells of the printed table, without the headings."""
    status, out, err = said
    assert (status, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def places(key: bytes, partitions: int) -> list[str]:
    return [str(murmur2_partition(key, partitions)), str(crc32_partition(key, partitions))]


@pytest.mark.parametrize(
    ("arguments", "shown", "key"),
    [
        (["customer-42"], "'customer-42'", b"customer-42"),
        ([""], "''", b""),
        (["käse"], r"'k\xe4se'", "käse".encode()),
        (["\x1b[2J"], r"'\x1b[2J'", b"\x1b[2J"),
        ([os.fsdecode(b"\xff")], r"'\udcff'", b"\xff"),
        (["--", "--int"], "'--int'", b"--int"),
        (["--int", "042"], "042", (42).to_bytes(16, "little")),
        (["--hex", "000000000000002a"], "000000000000002a", (42).to_bytes(8, "big")),
    ],
)
def test_a_key_is_shown_with_the_partition_of_each_kind_of_producer(
    lanes: Command, arguments: list[str], shown: str, key: bytes
) -> None:
    assert rows(lanes("kafka", "partition", "--partitions", "97", *arguments)) == [[shown, *places(key, 97)]]


def test_several_keys_are_several_rows(lanes: Command) -> None:
    assert rows(lanes("kafka", "partition", "a", "b", "--partitions", "8")) == [
        ["'a'", *places(b"a", 8)],
        ["'b'", *places(b"b", 8)],
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["kafka", "nonsense"], 64, "'nonsense'"),
        (["doctor", "nonsense"], 64, "'nonsense'"),
        (["doctor", "kafka", "--nonsense"], 64, "--nonsense"),
        (["kafka", "partition", "a"], 64, "--partitions"),
        (["kafka", "partition", "--partitions", "8"], 64, "KEY"),
        (["kafka", "partition", "--partitions", "0", "a"], 64, "--partitions 0: must be 1 or more"),
        (["kafka", "partition", "--partitions", "8", "--int", "--hex", "1"], 64, "takes --int or --hex, not both"),
        (["kafka", "partition", "--partitions", "8", "--int", "1_0"], 64, "KEY '1_0': must be a decimal number"),
        (["kafka", "partition", "--partitions", "8", "--int", "9" * 5_000], 64, "must be a decimal number"),
        (["kafka", "partition", "--partitions", "8", "--int", str(2**128)], 64, "must be in 0 … 2**128-1"),
        (["kafka", "partition", "--partitions", "8", "--hex", "abc"], 64, "KEY 'abc': must be bytes in hex"),
        (["kafka", "partition", "--partitions", "8", "\ud800"], 64, "surrogates not allowed"),
        (["doctor", "kafka", "-X", "bootstrap.servers=127.0.0.1:9"], 64, "`lanes doctor kafka` needs --group NAME"),
        (
            ["doctor", "kafka", "--server", "127.0.0.1:9"],
            64,
            "in --config FILE or by -X; run `lanes doctor kafka --help`",
        ),
        (["doctor", "kafka"], 64, "`lanes doctor kafka` needs --server HOST:PORT"),
        (
            ["doctor", "kafka", "-X", "bootstrap.server=127.0.0.1:9"],
            64,
            "or by -X; write 'bootstrap.servers' in place of 'bootstrap.server'; run `lanes doctor kafka --help`",
        ),
        (
            ["doctor", "kafka", "--server", "127.0.0.1:9", "-X", "groupid=x"],
            64,
            "needs --group NAME, or group.id in --config FILE or by -X; write 'group.id' in place of 'groupid'",
        ),
        (["doctor", "kafka", "--json"], 64, "`lanes doctor kafka` needs --server HOST:PORT"),
        (["doctor", "kafka", "--server", "127.0.0.1:9", "-X", "a"], 64, "-X number 1 is not name=value"),
        (["doctor", "kafka", "--server", "kafka://b:9", "--group", "g"], 64, "--server: 'kafka://b:9' has the scheme"),
        (["doctor", "kafka", "--server", "b", "--group", "g"], 64, "--server: 'b' has no port; write 'b:9092'"),
        (["doctor", "kafka", "--server", "b:x", "--group", "g"], 64, "--server: 'b:x' is not host:port"),
        (["doctor", "kafka", "--server", "u@b:9", "--group", "g"], 64, "--server contains an '@'"),
        (["doctor", "kafka", "--server", ",", "--group", "g"], 64, "--server=',' names no broker"),
        (
            ["doctor", "kafka", "--server", "b:9", "-X", "bootstrap.servers=b", "--group", "g"],
            3,
            "bootstrap.servers: 'b' has no port",
        ),
    ],
)
def test_a_kafka_command_prints_one_line_about_a_wrong_argument(
    lanes: Command, arguments: list[str], status: int, words: str
) -> None:
    found, out, err = lanes(*arguments)
    assert (found, out) == (status, "")
    assert err.startswith("lanes: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["kafka"], ["kafka", "--help"], ["kafka", "partition", "--help"], ["doctor"], ["doctor", "kafka", "--help"]],
)
def test_each_kafka_command_prints_its_help(lanes: Command, arguments: list[str]) -> None:
    status, out, err = lanes(*arguments)
    assert (status, err) == (0, "")
    usage = " ".join(each for each in arguments if each != "--help")
    assert out.startswith(f"Usage: lanes {usage} ")


@pytest.mark.parametrize("arguments", [["kafka", "partition", "a"], ["doctor", "kafka"]])
def test_a_kafka_command_names_a_missing_package_and_the_remedy(
    lanes: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(kit, "find_spec", lambda name: None if name == "confluent_kafka" else find_spec(name))
    status, out, err = lanes(*arguments)
    assert (status, out) == (3, "")
    assert "needs confluent_kafka: pip install '.[cli,kafka]' in the checkout of lanes" in err


@pytest.fixture
def group() -> str:
    return f"commands{os.getpid()}"


def test_the_doctor_prints_settings_and_checks(
    lanes: Command, kafka: KafkaServer, topic: MakeTopic, group: str, tmp_path: Path
) -> None:
    file, there = tmp_path / "client.properties", topic(1)
    file.write_text(f"# ours\nbootstrap.servers = 127.0.0.1:9\ngroup.id=other\nsasl.password={PASSWORD}\n")
    status, out, err = lanes(
        *("doctor", "kafka", "--config", str(file), "--server", kafka.url, "--group", group, "--topic", there.name)
    )
    assert (status, err) == (0, "")
    for text in ("fetch.queue.backoff.ms", "1048576", f"topic {there.name}", f"group {group}", "no members"):
        assert text in out
    assert "group other" not in out
    assert PASSWORD not in out


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (None, 0), (False, 3)])
def test_a_failed_check_exits_with_3_and_controls_no_terminal(
    lanes: Command, monkeypatch: pytest.MonkeyPatch, ok: bool | None, status: int
) -> None:
    hostile = Check("n\x1b[2J", ok, "d\x1b]0;x\x07[bold]", "r\x9b2J")
    monkeypatch.setattr(commands, "examine", lambda config, topics: [Check("first", True, "fine"), hostile])
    found, out, err = lanes("doctor", "kafka", "-X", "group.id=g", "-X", "bootstrap.servers=127.0.0.1:9")
    assert (found, err) == (status, "")
    assert "n·[2J" in out
    assert "d·]0;x·[bold]: r·2J" in out
    assert set(filterfalse(str.isprintable, out)) == {"\n"}


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".json", '{{"bootstrap.servers": "{url}", "group.id": "{group}", "session.timeout.ms": 6000}}'),
        (".toml", 'bootstrap.servers = "{url}"\ngroup.id = "{group}"\n[session]\ntimeout.ms = 6000\n'),
        (".config", "bootstrap.servers={url}\n! comment\n\ngroup.id={group}\nsession.timeout.ms=6000"),
    ],
)
def test_the_doctor_reads_a_file_by_its_suffix_and_prints_json(
    lanes: Command, kafka: KafkaServer, group: str, tmp_path: Path, suffix: str, text: str
) -> None:
    file = tmp_path / f"client{suffix}"
    file.write_text(text.format(url=kafka.url, group=group))
    status, out, err = lanes("doctor", "kafka", "--config", str(file), "--topic", "no-such-topic", "--json")
    assert (status, err) == (3, "")
    found = json.loads(out)
    assert (found["usable"], found["group"], found["protocol"]) == (False, group, "eager")
    assert {"name", "value", "reason"} == set(found["settings"][0])
    assert [each["name"] for each in found["checks"] if each["ok"] is False] == ["topic no-such-topic"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.properties", f"group.id=g\n{PASSWORD}\n", "line 2 is not name=value"),
        ("c.properties", f"={PASSWORD}\n", "line 1 is not name=value"),
        ("c.json", f'{{"sasl.password": "{PASSWORD}"', "not JSON (line 1"),
        ("c.json", f'["{PASSWORD}"]', "contains a list"),
        ("c.json", f'{{"a": {"9" * 5000}, "b": "{PASSWORD}"}}', "not JSON"),
        ("c.json", "[" * 200_000, "c.json"),
        ("c.toml", f"sasl.password = {PASSWORD}\n", "not TOML (at line 1"),
        ("c.toml", 'group.protocol = "classic"\ngroup.protocol.type = "consumer"\n', "not TOML"),
        ("c.properties", "sasl.password=\udce9", "not UTF-8 at byte 14"),
        ("", "", "name a file that can be read"),
    ],
)
def test_an_unusable_file_prints_one_line_without_its_values(
    lanes: Command, tmp_path: Path, name: str, text: str, words: str
) -> None:
    if name:
        (tmp_path / name).write_text(text, errors="surrogateescape")
    status, out, err = lanes("doctor", "kafka", "--config", str(tmp_path / name))
    assert (status, out) == (3, "")
    assert err.startswith("lanes: ")
    assert err.count("\n") == 1
    assert words in err
    assert PASSWORD not in err


def test_an_invalid_setting_is_not_repeated(lanes: Command) -> None:
    status, _, err = lanes("doctor", "kafka", "-X", "group.id=g", "-X", PASSWORD)
    assert status == 64
    assert "-X number 2 is not name=value" in err
    assert PASSWORD not in err
