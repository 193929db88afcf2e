"""`python -m tests.components run NAME... -- COMMAND...`: a command with real components beside it.

`{nats}` in COMMAND becomes the URL of that component, and the environment variable `NATS_URL` holds it too.
The components stop when the command has ended, and the exit status is the command's.

Ctrl+C, TERM and hang-up go on to the command, once each, and are otherwise waited out: it may drain. The
third one kills it. Should this process be killed, command and components end by themselves.
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
_PATIENCE = 2  # signals passed on before one kills
_USAGE = "usage: python -m tests.components run NAME... -- COMMAND..."


class Runner:
    """The command, and the signals on their way to it."""

    def __init__(self) -> None:
        self.command = Supervised("command")
        self._received: list[signal.Signals] = []
        self._passed = 0
        self._stage = "starting"

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """A signal handler. Before there is a command it ends this process, with all that was started."""
        self._received.append(signal.Signals(number))
        if self._stage == "starting":
            self._stage = "stopping"
            sys.exit(128 + number)
        if self._stage == "running":
            self._pass_on()

    def run(self, command: list[str], urls: dict[str, str]) -> int:
        """Run `command` to its end; its exit status. Blocks."""
        # From here a signal waits for the command instead of ending us with a half-started one.
        self._stage = "launching"
        variables = {f"{name.upper()}_URL": url for name, url in urls.items()}
        try:
            self.command.launch(command, log=False, env=os.environ | variables)
            self._stage = "running"
            self._pass_on()
            while self.command.alive:
                # In short waits: a signal just before a long one would be handled only at its end.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.command.wait(_WAIT_SECONDS)
            return self.command.wait()
        finally:
            # The components are being stopped from here on: there is nothing left to ask for.
            self._stage = "stopping"
            self.command.stop()

    def _pass_on(self) -> None:
        # One handler may interrupt another: `pop` hands each signal to exactly one of them. The command may
        # end at any moment: a signal that comes too late has nobody to go to.
        with contextlib.suppress(IndexError, ComponentError):
            while self.command.alive:
                number = self._received.pop(0)
                self._passed += 1
                if self._passed > _PATIENCE:
                    self.command.signal(signal.SIGKILL, group=True)
                else:
                    # A Ctrl+C reaches all of a command, as at a terminal; the others go to who was started.
                    self.command.signal(number, group=number is signal.SIGINT)


def main(arguments: list[str]) -> int:
    if "--" not in arguments or arguments[:1] != ["run"] or arguments[-1] == "--":
        print(_USAGE, file=sys.stderr)
        return 2
    split = arguments.index("--")
    names, command = arguments[1:split], arguments[split + 1 :]
    runner = Runner()
    for number in _PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: then it stays ignored
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
