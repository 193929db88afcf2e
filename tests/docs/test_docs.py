"""The code blocks of README.md, memsource/README.md and docs/**/*.md run without an error.

| fence | test |
|---|---|
| `python` | runs in a separate process; it must end with status 0 and without a warning |
| `python nats` | runs like `python`, with the URL of a real server in `NATS_URL` |
| `python kafka` | runs like `python`, with the address of a real broker in `KAFKA_URL` |
| `python postgres` | runs like `python`, with the address of a real server in `POSTGRES_URL` |
| `python nats forever` | runs like `python nats`; after its first output it gets a SIGTERM |
| `python nats orders=sales` | runs like `python nats`; the stream `SALES` has three messages |
| `python kafka orders=sales` | runs like `python kafka`; the topic `sales` has three messages, `sales-dead` exists |
| `python no-run` | is only compiled |
| `python shop.py` | runs like `python`, and is saved under this name in the working folder |
| `sh`, `console` | each `make` target and variable, and each extra of `pip install`, must exist; the rest runs |
| `sh nats`, `sh kafka`, `sh postgres` | runs like `sh`, with `NATS_URL`, `KAFKA_URL` or `POSTGRES_URL` |
| `sh folder` | runs like `sh`, in the working folder of the Python blocks |
| `sh cluster` | only its `make` and `pip` lines are checked |

The blocks of a page run in order. They share a private NATS server and a private PostgreSQL server. Python blocks share
a working folder; shell blocks run in the project folder, each in a separate shell. The test session provides the Kafka
broker; one page uses the broker at a time, and the topics of a page are deleted after the page. In a `console` block,
commands start with `$ `, and other lines are output.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from packaging.requirements import Requirement

from tests.components import KafkaServer, wait_until
from tests.conftest import NatsFactory, PostgresFactory

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "memsource" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELLS = ("sh", "bash", "console")
VARIABLES = {"nats": "NATS_URL", "kafka": "KAFKA_URL", "postgres": "POSTGRES_URL"}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SECONDS = 90.0  # below the timeout of a test, so that the failure names the block and shows its output


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its first line, the words of its fence, and its text."""

    page: str
    line: int  # number of its first line of text
    language: str
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """The commands of a shell block, with continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def blocks_of(page: str, text: str) -> list[Block]:
    """Return the fenced blocks of a page. A block without an end or a language fails the test."""
    found: list[Block] = []
    fence, start, info = "", 0, [""]
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        match = re.match(r"\s*(`{3,})\s*(.*)", line)
        if match is None:
            continue
        if not fence:
            fence, start, info = match[1], number, match[2].split()
            assert info, f"{page}:{number}: the block names no language; add one, such as `text`"
        elif match[1] == fence and not match[2]:
            inside = lines[start : number - 1]
            indent = min((len(one) - len(one.lstrip()) for one in inside if one.strip()), default=0)
            body = "".join(f"{one[indent:]}\n" for one in inside)
            found.append(Block(page, start + 1, info[0], tuple(info[1:]), body))
            fence = ""
    assert not fence, f"{page}:{start}: the block has no closing fence; add one"
    return found


def make_faults(command: str, makefile: str) -> list[str]:
    """Return the faults of a `make` command, judged by the Makefile."""
    faults = []
    for word in shlex.split(command, comments=True):
        name, assigned, _ = word.partition("=")
        if word == "make" or word.startswith("-"):
            continue
        if assigned and f"$({name})" not in makefile and f"$({name}," not in makefile:
            faults.append(f"the Makefile has no variable {name}")
        if not assigned and not re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE):
            faults.append(f"the Makefile has no target {word}")
    return faults


def is_make(command: str) -> bool:
    words = [word for word in command.split() if "=" not in word]
    return words[:1] == ["make"]


def pip_faults(command: str, project: dict[str, Any]) -> list[str]:
    """Return the faults of a `pip install` command, judged by the project's metadata."""
    faults = []
    for word in shlex.split(command, comments=True)[2:]:
        if word.startswith("-"):
            continue
        wanted = Requirement(re.sub(r"^\.(?=\[|$)", project["name"], word))  # `.` is the checkout
        if wanted.name != project["name"]:
            faults.append(f"{wanted.name} is not this project")
        unknown = wanted.extras - project["optional-dependencies"].keys()
        faults += [f"the project has no extra {extra}" for extra in sorted(unknown)]
    return faults


ORDERS = {
    "nats": """
        import asyncio, os, nats

        async def main():
            client = await nats.connect(os.environ["NATS_URL"])
            await client.jetstream().add_stream(name="NAME", subjects=["name.*"])
            for customer in ("ann", "bob", "ann"):
                await client.jetstream().publish(f"name.{customer}", b"book")
            await client.close()

        asyncio.run(main())
    """,
    "kafka": """
        import os
        from confluent_kafka import Producer
        from confluent_kafka.admin import AdminClient, NewTopic

        brokers = {"bootstrap.servers": os.environ["KAFKA_URL"]}
        admin = AdminClient(brokers)
        missing = {"name", "name-dead"} - admin.list_topics(timeout=10).topics.keys()
        for created in admin.create_topics([NewTopic(topic, 4, 1) for topic in missing]).values() if missing else ():
            created.result()
        producer = Producer(brokers)
        for customer in ("ann", "bob", "ann"):
            producer.produce("name", b"book", key=customer)
        assert producer.flush(10) == 0
    """,
}
"""Programs that publish the messages for a block with a word such as `orders=sales`."""


Urls = Mapping[str, Callable[[], str]]
"""Functions that return the address of a server; the first call on a page starts the server."""


def run(command: list[str], block: Block, urls: Urls, cwd: Path, tmp_path: Path) -> None:
    """Run a block, and assert its success; a failure shows its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    for server, variable in VARIABLES.items():
        env.pop(variable, None)
        if server in block.words:
            env[variable] = urls[server]()
    output = tmp_path / "output"
    with output.open("w") as sink:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=sink, stderr=subprocess.STDOUT)
        try:
            if "forever" in block.words:
                wait_until(
                    lambda: output.stat().st_size > 0 or process.poll() is not None, "the first line", seconds=SECONDS
                )
                process.terminate()
            code = process.wait(SECONDS)
        except TimeoutError as error:
            pytest.fail(f"{block}: {error}\n{block.text}\n{output.read_text()}")
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"{block}: no end after {SECONDS:g} s\
{block.text}\
{output.read_text()}"
            )
        finally:
            process.kill()
            process.wait()
    assert code == 0, f"{block}: status {code}\n{block.text}\n{output.read_text()}"


def check(block: Block, urls: Urls, tmp_path: Path) -> None:
    """Test a block as the words of its fence require."""
    if block.language == "python":
        # Empty lines before the text, so that a traceback has the line numbers of the page.
        source = "\n" * (block.line - 1) + block.text
        if "no-run" in block.words:
            compile(source, block.page, "exec", dont_inherit=True)
            return
        for name in [word.removeprefix("orders=") for word in block.words if word.startswith("orders=")]:
            (server,) = ORDERS.keys() & set(block.words)
            before = textwrap.dedent(ORDERS[server]).replace('"name', f'"{name}').replace("NAME", name.upper())
            check(Block(block.page, block.line, "python", (server,), before), urls, tmp_path)
        saved = next((word for word in block.words if word.endswith(".py")), Path(block.page).with_suffix(".py").name)
        script = tmp_path / saved
        script.write_text(source)
        run([sys.executable, "-W", "error", str(script)], block, urls, tmp_path, tmp_path)
    elif block.language in SHELLS:
        rest = []
        for command in block.commands():
            if is_make(command):
                assert make_faults(command, (ROOT / "Makefile").read_text()) == [], f"{block}: {command}"
            elif command.startswith("pip install "):
                assert pip_faults(command, PROJECT) == [], f"{block}: {command}"
            else:
                rest.append(command)
        if rest and "cluster" not in block.words:
            folder = tmp_path if "folder" in block.words else ROOT
            run(["sh", "-eu", "-c", "\n".join(rest)], block, urls, folder, tmp_path)


@pytest.fixture
def urls(fresh_nats: NatsFactory, fresh_postgres: PostgresFactory, request: pytest.FixtureRequest) -> Urls:
    nats, postgres = functools.cache(fresh_nats), functools.cache(fresh_postgres)
    return {
        "nats": lambda: nats().url,
        "kafka": lambda: str(request.getfixturevalue("clean_kafka")),
        "postgres": lambda: postgres().url,
    }


@pytest.fixture
def clean_kafka(kafka: KafkaServer) -> Iterator[str]:
    """The address of the session's broker for one test at a time. The topics of pages are deleted after the test."""
    admin = AdminClient({"bootstrap.servers": kafka.url})
    with (kafka.folder / "pages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the session may test another page
        yield kafka.url
        of_pages = [name for name in admin.list_topics(timeout=SECONDS).topics if is_of_a_page(name)]
        for deleted in admin.delete_topics(of_pages).values() if of_pages else ():
            deleted.result(SECONDS)


@functools.cache
def words_of_pages() -> frozenset[str]:
    return frozenset(
        word
        for path in (*filter(asks_for_kafka, PAGES), Path(__file__))
        for word in re.findall(r"[\w.-]+", path.read_text())
    )


def is_of_a_page(topic: str) -> bool:
    """Whether a page creates this topic; tests in other processes create others on the same broker."""
    return topic.partition("__p")[0].removesuffix("-dead") in words_of_pages()


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len(README.read_text().splitlines()) <= 140


def test_the_readme_is_one_of_the_tested_pages() -> None:
    assert README.exists(), "README.md is missing"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def asks_for_kafka(page: Path) -> bool:
    return re.search(r"^\s*`{3,}.* kafka\b", page.read_text(), re.MULTILINE) is not None


@pytest.mark.timeout(300)  # for a whole page; each block has a separate limit
@pytest.mark.parametrize("page", [page for page in PAGES if not asks_for_kafka(page)], ids=name_of)
def test_the_programs_and_commands_of_a_page_run(page: Path, urls: Urls, tmp_path: Path) -> None:
    check_page(page, urls, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("kafka_prepared")  # so that its jars are fetched before the tests
@pytest.mark.parametrize("page", [page for page in PAGES if asks_for_kafka(page)], ids=name_of)
def test_the_programs_and_commands_of_a_page_about_kafka_run(page: Path, urls: Urls, tmp_path: Path) -> None:
    check_page(page, urls, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("kafka_prepared")
def test_readme_start_pages_and_guides_run_on_one_broker(urls: Urls, tmp_path: Path) -> None:
    """As a newcomer does who follows one page after the other: `test_one_broker` names what two pages share."""
    for page in [
        README,
        *sorted((ROOT / "docs" / "start").glob("*.md")),
        *sorted((ROOT / "docs" / "guides").glob("*.md")),
    ]:
        folder = tmp_path / page.stem
        folder.mkdir()
        check_page(page, urls, folder)


def check_page(page: Path, urls: Urls, tmp_path: Path) -> None:
    for block in blocks_of(name_of(page), page.read_text()):
        check(block, urls, tmp_path)


@pytest.mark.timeout(300)
def test_the_programs_about_ranges_run_again_and_keep_the_operators_moves(urls: Urls, tmp_path: Path) -> None:
    page = ROOT / "docs" / "guides" / "ranges.md"
    check_page(page, urls, tmp_path)
    named = '--log ranged-orders --group billing --dsn "$POSTGRES_URL"'
    for moved in ("assign 32768 65535 a", "split 16384 c"):
        check(block("sh", f"lanes ring {moved} {named}\n", "postgres"), urls, tmp_path)
    check_page(page, urls, tmp_path)
    check(block("sh", f"lanes ring status --json {named} > status.json\n", "postgres", "folder"), urls, tmp_path)
    assert json.loads((tmp_path / "status.json").read_text())["ranges"] == [
        {"lo": 0, "hi": 16383, "consumer": "a"},
        {"lo": 16384, "hi": 32767, "consumer": "c"},
        {"lo": 32768, "hi": 65535, "consumer": "a"},
    ]


def block(language: str, text: str, *words: str) -> Block:
    return Block("page.md", 1, language, words, text)


def test_each_block_is_found_with_the_line_of_its_fence() -> None:
    text = "# t\n\n```python no-run\nx = 1\n```\n\n- item\n\n  ```sh\n  make run\n    deep\n  ```\n"
    assert blocks_of("page.md", text) == [
        Block("page.md", 4, "python", ("no-run",), "x = 1\n"),
        Block("page.md", 10, "sh", (), "make run\n  deep\n"),
    ]


@pytest.mark.parametrize("text", ["```python\nx = 1\n", "```\nx = 1\n```\n"])
def test_a_fence_without_a_language_or_an_end_is_refused(text: str) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:1"):
        blocks_of("page.md", text)


def test_a_shell_block_is_divided_into_its_commands() -> None:
    assert block("sh", "# why\nlanes check \\\n  x\n\nls\n").commands() == ["lanes check    x", "ls"]
    assert block("console", "$ ls\nREADME.md\n$ make run\nmake: done\n").commands() == ["ls", "make run"]


def test_a_target_or_variable_that_the_makefile_lacks_is_found_on_a_page() -> None:
    makefile = "run: environment  ## it\n\t@lanes demo $(ARGS) $(or $(SECONDS),60)\n"
    assert make_faults('make run ARGS="--latency 5ms" SECONDS=3  # fast', makefile) == []
    assert make_faults("make walk FEET=2", makefile) == [
        "the Makefile has no target walk",
        "the Makefile has no variable FEET",
    ]


def test_an_extra_that_the_project_lacks_is_found_on_a_page() -> None:
    project = {"name": "lanes-runtime", "optional-dependencies": {"cli": []}}
    assert pip_faults("pip install -U 'lanes-runtime[cli]'  # both", project) == []
    assert pip_faults("pip install '.[cli]'", project) == pip_faults("pip install .", project) == []
    assert pip_faults("pip install '.[clo]'", project) == ["the project has no extra clo"]
    assert pip_faults("pip install lane 'lanes-runtime[clo]'", project) == [
        "lane is not this project",
        "the project has no extra clo",
    ]


@pytest.mark.parametrize(
    "bad",
    [
        block("python", "raise SystemExit(3)\n"),
        block("python", "import warnings\nwarnings.warn('old', DeprecationWarning)\n"),
        block("sh", "false\ntrue\n"),
        block("sh", "make no-such-target\n", "cluster"),
        block("console", "$ exit 4\n"),
        block("python", "print(end='')\nraise SystemExit(5)\n", "forever"),
    ],
    ids=lambda bad: f"{bad.language}-{bad.text.split()[0]}",
)
def test_a_page_with_a_failing_program_fails_its_test(bad: Block, urls: Urls, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:1"):
        check(bad, urls, tmp_path)


def test_a_command_can_run_a_program_that_a_page_has_saved(urls: Urls, tmp_path: Path) -> None:
    check(block("python", "def ship() -> None: ...\n", "shop.py"), urls, tmp_path)
    check(block("sh", 'python -c "import shop; shop.ship()"\n', "folder"), urls, tmp_path)
    with pytest.raises(AssertionError, match=r"page\.md:1"):
        check(block("sh", 'python -c "import shop"\n'), urls, tmp_path)


def test_a_page_with_a_syntax_error_fails_its_test(urls: Urls, tmp_path: Path) -> None:
    with pytest.raises(SyntaxError):
        check(block("python", "x = = 1\n", "no-run"), urls, tmp_path)


def test_an_endless_block_gets_a_sigterm(urls: Urls, tmp_path: Path) -> None:
    text = """
import signal, sys
from tests.components import wait_until
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
wait_until(lambda: False, "a signal")
"""
    check(block("python", text, "forever"), urls, tmp_path)
    with pytest.raises(AssertionError, match="status 3"):
        check(block("python", text.replace("exit(0)", "exit(3)"), "forever"), urls, tmp_path)


@pytest.mark.parametrize("server", sorted(ORDERS))
def test_a_block_gets_the_messages_that_its_fence_asks_for(server: str, urls: Urls, tmp_path: Path) -> None:
    count = {
        "nats": """
            import asyncio, os, nats
            async def main():
                client = await nats.connect(os.environ["NATS_URL"])
                assert (await client.jetstream().stream_info("SALES")).state.messages == 3
                await client.close()
            asyncio.run(main())
        """,
        "kafka": """
            import os
            from confluent_kafka import Consumer, TopicPartition
            consumer = Consumer({"bootstrap.servers": os.environ["KAFKA_URL"], "group.id": "count"})
            ends = [consumer.get_watermark_offsets(TopicPartition("sales", number))[1] for number in range(4)]
            consumer.close()
            assert sum(ends) == 3, ends
        """,
    }
    check(block("python", textwrap.dedent(count[server]), server, "orders=sales"), urls, tmp_path)


def test_a_block_gets_the_broker_that_its_fence_asks_for(clean_kafka: str, urls: Urls, tmp_path: Path) -> None:
    ask = """
        import os
        from confluent_kafka.admin import AdminClient, NewTopic
        assert "NATS_URL" not in os.environ
        admin = AdminClient({"bootstrap.servers": os.environ["KAFKA_URL"]})
        admin.create_topics([NewTopic("of-a-page", 1, 1)])["of-a-page"].result()
    """
    check(blocks_of("page.md", f"```python kafka\n{ask}\n```")[0], urls, tmp_path)
    assert "of-a-page" in AdminClient({"bootstrap.servers": clean_kafka}).list_topics(timeout=SECONDS).topics
    with pytest.raises(AssertionError, match="status 1"):
        check(blocks_of("page.md", f"```python kafka\n{ask}\n```")[0], urls, tmp_path)


def test_a_block_gets_the_server_that_its_fence_asks_for(urls: Urls, tmp_path: Path) -> None:
    connect = """
        import asyncio, os, nats
        async def main():
            client = await nats.connect(os.environ["NATS_URL"])
            await client.close()
        asyncio.run(main())
    """
    asking = blocks_of("page.md", f"```python nats\n{connect}\n```")[0]
    check(asking, urls, tmp_path)
    check(block("sh", 'test -n "$NATS_URL"\n', "nats"), urls, tmp_path)
    check(block("sh", 'test -n "$POSTGRES_URL"\n', "postgres"), urls, tmp_path)
    check(block("sh", 'test -z "${NATS_URL:-}${KAFKA_URL:-}${POSTGRES_URL:-}"\n'), urls, tmp_path)


WIDTH = 88
"""The columns of code that the site shows on a screen of 1280 pixels."""


OTHERS = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").rglob("*.md"))]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_no_line_of_a_block_is_too_wide_for_the_site(page: Path) -> None:
    assert wide_lines(name_of(page), page.read_text()) == []


def wide_lines(page: str, text: str) -> list[str]:
    """The lines of code that are cut off or scrolled."""
    numbered = [
        (f"{block.page}:{block.line + number}", line)
        for block in blocks_of(page, text)
        for number, line in enumerate(block.text.splitlines())
    ]
    return [f"{place}: {len(line)} columns" for place, line in numbered if len(line) > WIDTH]


def test_a_line_that_is_too_wide_for_the_site_is_found() -> None:
    text = f"{'x' * 90}\n\n```text\n{'x' * 88}\n{'x' * 89}\n```\n"
    assert wide_lines("page.md", text) == ["page.md:5: 89 columns"]


def installs(page: str, text: str) -> list[str]:
    return [line for block in blocks_of(page, text) for line in block.commands() if line.startswith("pip install ")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_installs_from_the_checkout(page: Path) -> None:
    """No registry has the package yet, so its name alone installs nothing."""
    assert [line for line in installs(name_of(page), page.read_text()) if PROJECT["name"] in line] == []
    assert installs(name_of(README), README.read_text())[0] == "pip install '.[kafka]'"
