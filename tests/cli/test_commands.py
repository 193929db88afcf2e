"""A mistake in a command prints one clear line, and ends with an exit status above 0."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from itertools import filterfalse
from pathlib import Path
from typing import NamedTuple

import pytest

from lanes.cli import app as cli
from lanes.cli import kit
from lanes.core.ring import lane, partition, slot
from lanes.core.types import PartitionId
from lanes.history.recorder import Recorder


class Said(NamedTuple):
    status: object
    out: str
    err: str


Command = Callable[..., Said]

SERVER = ("--server", "nats://127.0.0.1:1")


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    # Tables have the width of the terminal, and the tests have no terminal.
    monkeypatch.setenv("COLUMNS", "100")

    def command(*arguments: str) -> Said:
        monkeypatch.setattr("sys.argv", ["lanes", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Said(ended.value.code or 0, captured.out, captured.err)

    return command


def test_the_version_is_printed(lanes: Command) -> None:
    assert lanes("--version") == (0, f"lanes {version('lanes-runtime')}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["check", "--help"], ["ring", "--help"], ["route", "--help"]])
def test_each_command_prints_its_help(lanes: Command, arguments: list[str]) -> None:
    said = lanes(*arguments)
    assert (said.status, said.err) == (0, "")
    assert "Usage: lanes" in said.out


@pytest.mark.parametrize("command", [[], ["doctor"], ["doctor", "kafka"], ["dead-letters", "list"], ["ring"]])
def test_the_option_h_prints_the_help_too(lanes: Command, command: list[str]) -> None:
    assert lanes(*command, "-h") == (0, lanes(*command, "--help").out, "")


@pytest.mark.parametrize("group", ["cohort", "dead-letters", "doctor", "journal", "kafka", "queue", "ring", "spark"])
def test_a_group_without_a_command_prints_its_help(lanes: Command, group: str) -> None:
    said = lanes(group)
    assert (said.status, said.err) == (0, "")
    assert said.out == lanes(group, "--help").out
    assert said.out.startswith(f"Usage: lanes {group} ")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nonsense"], 64, "'nonsense'"),
        (
            ["doctor", "rabbitmq"],
            64,
            "No such command 'rabbitmq'; `lanes doctor` has jetstream, kafka, postgres, spark; run `lanes doctor",
        ),
        (
            ["dead-letters", "drop", "--all"],
            64,
            (
                "No such option: --all; `lanes dead-letters drop` has ID, --topic, --config, -X, --subject, --server, "
                "--name, --dsn, --schema, --json, --help, -h; run `lanes dead-letters drop --help`"
            ),
        ),
        (
            ["dead-letters", "list", "--tpoic", "x"],
            64,
            "No such option: --tpoic; `lanes dead-letters list` has --topic; run",
        ),
        (
            ["dead-letters", "list", "--topic"],
            64,
            "`lanes dead-letters list` has --topic without a value; write --topic NAME; run `lanes dead",
        ),
        (
            ["dead-letters", "list", "--server", "--topic", "x"],
            64,
            "`lanes dead-letters list` has --server without a value; write --server ADDRESS; run",
        ),
        (["ring", "--lanes", "--", "--lanes"], 64, "--lanes"),
        (
            ["doctor", "kafka", "--group", "g", "--topic", "t1,t2"],
            64,
            "`lanes doctor kafka` has --topic 't1,t2', and a name has no comma; repeat the option: --topic NAME",
        ),
        (["check"], 64, "FILE"),
        (["check", "/no/such/file"], 3, "/no/such/file"),
        (["ring", "--lanes", "8"], 64, "KEY"),
        (["ring", "--lanes", "few", "a"], 64, "--lanes"),
        (["ring", "--lanes", "0", "a"], 64, "--lanes=0: a key needs a lane; use 1 or more"),
        (["ring", "--partitions", "-1", "a"], 64, "--partitions=-1: a key needs a partition"),
        (["doctor", "spark", "--effects", "some"], 64, "--effects 'some': must be "),
        (["ring", "--int", "1", "1_0"], 64, "KEY '1_0': must be a decimal number of up to 39 digits with --int"),
        (["ring", "--int", "\u0661"], 64, r"KEY '\u0661': must be a decimal number"),
        (["ring", "--int", "9" * 5_000], 64, "must be a decimal number"),
        (["ring", "--int", str(2**128)], 64, "must be in 0 … 2**128-1"),
        (["ring", "--int", "--", "-1"], 64, "must be in 0 … 2**128-1, and this one is below 0"),
        (["ring", "\ud800"], 64, "surrogates not allowed"),
        (["route"], 64, "QUEUE"),
        (["route", "orders"], 64, "KEY"),
        (
            ["route", "orders", "a"],
            64,
            "`lanes route` needs --partitions NUMBER, or --partition NAME for each partition; run `lanes route --help`",
        ),
        (
            ["route", "orders", "a", "--partition", "eu", "--partition", "us", "--partitions", "1"],
            64,
            "`lanes route` names 2 partition(s) by --partition, but has --partitions 1; name each partition",
        ),
        (["route", "orders", "a", "--partition", "eu", "--partition", "eu"], 64, "--partition 'eu': is also"),
        (["route", "", "a", "--partition", "eu"], 64, "QUEUE '': must not be empty"),
        (
            ["queue", "grow", "orders", "--from", "1", "--to", "3", "--partition", "eu", "--partition", "us"],
            64,
            "`lanes queue grow` names 2 partition(s) by --partition, but has --to 3; name each partition",
        ),
        (
            [
                "queue",
                "shrink",
                "orders",
                "--from",
                "2",
                "--to",
                "1",
                *(["--partition", "eu", "--partition", "us"]),
                *("--partition", "ap"),
            ],
            64,
            "`lanes queue shrink` names 3 partitions by --partition, but has only --from 2 --to 1; name each",
        ),
        (
            [*("queue", "status", "orders", "--partitions", "2"), *("--stream", "S", "--server", "http://x:4222")],
            64,
            "lanes: --server: the scheme http:// is not a scheme of NATS",
        ),
        (
            [*("queue", "status", "orders", "--partitions", "2"), *("--stream", "a b", "--server", "x:4222")],
            64,
            "lanes: --stream='a b': must be a name without blanks, dots",
        ),
        (
            [*("queue", "status", "or ders", "--partitions", "2"), *("--stream", "S", "--server", "x:4222")],
            64,
            "lanes: QUEUE 'or ders': the physical queue 'or ders' is not a valid subject",
        ),
        (
            [*("queue", "status", "or ders", "--partitions", "2"), *("--server", "127.0.0.1:9")],
            64,
            "lanes: QUEUE has the physical queue 'or ders': no topic can have this name",
        ),
        (["queue", "status", "orders"], 64, "`lanes queue status` needs --partitions NUMBER, or --partition NAME"),
        (["route", "", "a", "--partitions", "1"], 64, "QUEUE '': must not be empty"),
        (["route", "a\x1b", "a", "--partitions", "1"], 64, "contains U+001B, but a name is one line of text"),
        (["route", "orders", "a", "--partitions", "0"], 64, "--partitions 0: must be a whole number, 1 or more"),
        (["route", "orders", "a", "--partitions", "32768"], 64, "--partitions 32768: queue 'orders' can have at most"),
        (
            ["route", "--int", "orders", "1_0", "--partitions", "4"],
            64,
            "KEY '1_0': must be a decimal number of up to 39 digits with --int",
        ),
    ],
)
def test_a_command_prints_one_line_about_a_wrong_argument(
    lanes: Command, arguments: list[str], status: int, words: str
) -> None:
    said = lanes(*arguments)
    assert (said.status, said.out) == (status, "")
    assert said.err.startswith("lanes: ")
    assert words in said.err
    assert said.err.count("\n") == 1


def test_without_typer_the_command_line_says_what_to_install(lanes: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "find_spec", lambda name: None if name == "typer" else find_spec(name))
    said = lanes("ring", "a")
    assert said.status == 3
    assert "needs typer: pip install '.[cli]' in the checkout of lanes\n" in said.err
    assert said.err.count("\n") == 1


def test_check_prints_every_verdict(lanes: Command, tmp_path: Path) -> None:
    history = Recorder(tmp_path, member="publisher")
    history.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=1.0)
    history.produced(PartitionId("S", 0), 1, b"a", 1.0)
    history.close("stopped", 2.0)
    said = lanes("check", str(tmp_path))
    # The history has a row `produced`, but no row of a handler.
    assert said.status in (1, 2)
    assert said.err == ""
    for name in ("PerKeyOrder", "NoOverlap", "AtLeastOnce", "BoundedInFlight", "NoSettleBeforeEnd"):
        assert name in said.out


def rows(said: Said) -> list[list[str]]:
    """The cells of the table, with the headings first."""
    assert (said.status, said.err) == (0, "")
    lines = [line.replace("┃", "│") for line in said.out.splitlines() if line.startswith(("┃", "│"))]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_ring_shows_where_each_key_goes(lanes: Command) -> None:
    assert rows(lanes("ring", "customer-42", "")) == [
        ["key", "slot", "ring partition of 64", "lane of 16"],
        ["'customer-42'", "40279", "18", "1"],
        ["''", "5039", "63", "7"],
    ]
    assert rows(
        lanes("ring", "--int", "--partitions", "4", "--lanes", "4", "0", "1", "042", "--", str(2**128 - 1))
    ) == [
        ["key", "slot", "ring partition of 4", "lane of 4"],
        ["0", "29413", "0", "0"],
        ["1", "20596", "2", "3"],
        ["42", "58486", "3", "3"],
        ["340282366920938463463374607431768211455", "34755", "3", "0"],
    ]


def test_route_shows_the_physical_queue_of_each_key(lanes: Command) -> None:
    assert rows(lanes("route", "customer-updates", "--partitions", "8", "customer-42", "a\x1b[31m")) == [
        ["key", "physical queue", "partition of 8"],
        ["'customer-42'", "customer-updates__p5", "5"],
        ["'a\\x1b[31m'", "customer-updates__p4", "4"],
    ]
    assert rows(lanes("route", "--int", "customer-updates", "--partitions", "4", "42", "--", "1")) == [
        ["key", "physical queue", "partition of 4"],
        ["42", "customer-updates__p1", "1"],
        ["1", "customer-updates__p2", "2"],
    ]


def test_route_over_one_partition_shows_the_plain_queue(lanes: Command) -> None:
    assert rows(lanes("route", "orders", "--partitions", "1", "customer-42"))[1] == ["'customer-42'", "orders", "0"]


def test_the_help_of_ring_names_the_partitions_that_it_does_not_show(lanes: Command) -> None:
    said = " ".join(lanes("ring", "slot", "--help").out.split())
    for words in ("no broker assigns messages", "lanes kafka partition", "nats stream subjects STREAM"):
        assert words in said


def test_ring_shows_a_key_that_is_the_name_of_its_command(lanes: Command) -> None:
    assert rows(lanes("ring", "slot", "assign"))[1][:2] == ["'assign'", str(slot("assign"))]


def test_ring_hashes_a_number_and_the_text_of_its_digits_differently(lanes: Command) -> None:
    assert rows(lanes("ring", "1"))[1][1] != rows(lanes("ring", "--int", "1"))[1][1]


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("\x1b[2J\x07", r"'\x1b[2J\x07'"),
        ("a\nb\tc", r"'a\nb\tc'"),
        ("[bold red]x[/]", "'[bold red]x[/]'"),
        (":warning:", "':warning:'"),
        ("https://example.invalid/1", "'https://example.invalid/1'"),
        ("käse", r"'k\xe4se'"),
        ("\u202e\u05d0", r"'\u202e\u05d0'"),
    ],
)
def test_ring_shows_a_hostile_key_escaped(lanes: Command, key: str, shown: str) -> None:
    said = lanes("ring", key)
    assert rows(said)[1][:2] == [shown, str(slot(key))]
    assert said.out.isprintable() or set(filterfalse(str.isprintable, said.out)) == {"\n"}


def test_ring_takes_the_bytes_of_a_key_that_is_not_utf8(lanes: Command) -> None:
    key = b"\xff\xfe"
    assert rows(lanes("ring", os.fsdecode(key)))[1] == [
        r"'\udcff\udcfe'",
        str(slot(key)),
        str(partition(key, 64)),
        str(lane(key, 16)),
    ]


def test_ring_folds_a_long_key_and_keeps_its_numbers_whole(lanes: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, first, *more = rows(lanes("ring", "k" * 200))
    assert first[1:] == [str(slot("k" * 200)), str(partition("k" * 200, 64)), str(lane("k" * 200, 16))]
    assert "".join(row[0] for row in [first, *more]) == repr("k" * 200)


def test_a_journal_is_made_and_checked_like_its_history(lanes: Command, tmp_path: Path) -> None:
    history = Recorder(tmp_path, member="m")
    history.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=1.0)
    history.close("drained", 2.0)
    to = tmp_path / "journal"
    made = lanes("journal", "convert", str(history.path), "--to", str(to))
    (path,) = to.glob("*.parquet")
    assert made == (0, f"{path}\n", "")
    assert lanes("check", str(to)) == lanes("check", str(history.path))


def test_a_file_that_is_no_history_makes_no_journal(lanes: Command, tmp_path: Path) -> None:
    empty, to = tmp_path / "empty.jsonl", tmp_path / "journal"
    empty.touch()
    for file, said in ((empty, "the file has no history"), (tmp_path / "nowhere", "No such file or directory")):
        made = lanes("journal", "convert", str(file), "--to", str(to))
        assert (made.status, made.out) == (3, "")
        assert made.err.startswith(f"lanes: {file}: {said}")
    assert list(to.iterdir()) == []


@pytest.mark.process
def test_commands_print_no_line_of_a_client() -> None:
    program = (
        "import logging\n"
        "from lanes.cli.app import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    for name in ('lanes.kafka.client', 'lanes.jetstream.client', 'lanes.kafka'):\n"
        "        logging.getLogger(name).warning('a line of %s', name)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, timeout=60)
    assert ran.stderr == "a line of lanes.kafka\n"


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["ring", "a", "b"]])
def test_a_closed_pipe_ends_a_command_without_a_line(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "lanes", *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")
