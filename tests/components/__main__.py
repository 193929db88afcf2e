"""Run a command together with real components: `python -m tests.components run NAME... -- COMMAND...`.

`{nats}` in COMMAND becomes the URL of the component, and the environment variable `NATS_URL` has the same value. The
components stop after the command. The exit status is the exit status of the command.

This process passes the first two signals (Ctrl+C, TERM or hang-up) to the command, which may drain. The third signal
kills the command. If this process is killed, the command and the components end too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

from tests.components import ComponentError, Supervised, running

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAIT_SECONDS = 0.5
_PATIENCE = 2  # number of signals that are passed on; the next signal kills
_USAGE = "usage: python -m tests.components run NAME... -- COMMAND..."


class Runner:
    """The command, and the signals for it."""

    def __init__(self) -> None:
        self.command = Supervised("command")
        self._received: list[signal.Signals] = []
        self._passed = 0
        self._stage = "starting"

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal. Before the command has started, the signal ends this process and the components."""
        self._received.append(signal.Signals(number))
        if self._stage == "starting":
            self._stage = "stopping"
            sys.exit(128 + number)
        if self._stage == "running":
            self._pass_on()

    def run(self, command: list[str], urls: dict[str, str]) -> int:
        """Run `command` to its end, and return its exit status. Blocks."""
        # From here on, a signal waits until the command has started; it must not end this process in between.
        self._stage = "launching"
        variables = {f"{name.upper()}_URL": url for name, url in urls.items()}
        try:
            self.command.launch(command, log=False, env=os.environ | variables)
            self._stage = "running"
            self._pass_on()
            while self.command.alive:
                # Short waits, because Python handles a signal that arrives just before a wait only after the wait.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.command.wait(_WAIT_SECONDS)
            return self.command.wait()
        finally:
            # From here on, the components stop, so a signal has no further effect.
            self._stage = "stopping"
            self.command.stop()

    def _pass_on(self) -> None:
        # One signal handler may interrupt another, and `pop` returns each signal to only one of them. The command may
        # end at any moment, so a late signal is dropped.
        with contextlib.suppress(IndexError, ComponentError):
            while self.command.alive:
                number = self._received.pop(0)
                self._passed += 1
                if self._passed > _PATIENCE:
                    self.command.signal(signal.SIGKILL, group=True)
                else:
                    # A Ctrl+C reaches the whole process group, as at a terminal; other signals reach only the command's
                    # first process.
                    self.command.signal(number, group=number is signal.SIGINT)


def main(arguments: list[str]) -> int:
    if "--" not in arguments or arguments[:1] != ["run"] or arguments[-1] == "--":
        print(_USAGE, file=sys.stderr)
        return 2
    split = arguments.index("--")
    names, command = arguments[1:split], arguments[split + 1 :]
    runner = Runner()
    for number in _PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # an ignored signal stays ignored, as under nohup
            signal.signal(number, runner.receive)
    try:
        with running(*names) as urls:
            for name, url in urls.items():
                command = [word.replace(f"{{{name}}}", url) for word in command]
            return runner.run(command, urls)
    except ComponentError as error:
        print(f"components: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
