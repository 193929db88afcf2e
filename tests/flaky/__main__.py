"""Tests again and again on a busy machine: `python -m tests.flaky [--seconds N] [full | PATH...]`, or `make flaky`.

Each test that uses a broker, a process, a thread or a timer (`tests/flaky/choosing.py`) is run 30 times, and all of
`make test` three times, in random order, beside processes that burn the machine's cores. This takes hours, in slices of
some minutes: what each has shown is kept in `.cache/flaky/state.json`, so that it is stopped at any time, after
`--seconds` by itself, and the next start goes on. `full` begins with the full runs; a PATH runs the tests of a file, or
of a folder, alone. A record belongs to what was tested: where the packages, or what starts the servers, are others all
is begun anew, and the old record put aside; a test begins anew where its own file or a helper is another one.

Prints a line a slice, and at the end what is missing and the tests that failed. Status 1 when one failed, on this or an
earlier start, and was not changed since; 2 for a wrong argument, when pytest itself failed, or when files were changed
while it ran: such runs are not counted, and their failures printed. 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.components.alone import alone
from tests.flaky.choosing import ROOT, RULES, everything, product
from tests.flaky.load import load
from tests.flaky.record import FULL_RUNS, REPEATS, Record, Slice, group_of

FOLDER: Final = ROOT / ".cache" / "flaky"
SLICE_SECONDS: Final = 600.0
LEAST_SECONDS: Final = 30.0
"""With less time left no slice is begun: pytest would hardly have started."""
FULL_SECONDS: Final = 1800.0
"""What a full run is taken to need while none was seen."""
STOPPING_SECONDS: Final = 60.0


class FlakyError(Exception):
    """pytest did not run what it was given; the message ends with its last lines."""


class Flaky:
    """One start. ``processes``: of pytest; ``burners``: of the load beside it."""

    def __init__(self, record: Record, *, processes: int, burners: int, until: float) -> None:
        self._record = record
        self._processes = processes
        self._burners = burners
        self._until = until
        self._tested = product(), everything()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._until - time.monotonic()

    def next_slice(self, paths: Sequence[str], *, repeats: int) -> Slice | None:
        """What takes these processes some minutes; None when no run is missing."""
        return self._record.next_slice(paths, repeats=repeats, seconds=SLICE_SECONDS, processes=self._processes)

    def choose(self) -> None:
        """Let pytest collect all, and write down what is chosen. Blocks, some ten seconds."""
        chosen = FOLDER / "chosen.json"
        chosen.unlink(missing_ok=True)
        if not self._pytest("--collect-only", "-q", "-p", "no:randomly", "--flaky-choose", str(chosen)):
            raise FlakyError("the time was over before the tests were collected")
        self._check("they were collected")
        anew = self._record.choose(json.loads(chosen.read_text()))
        if anew:
            print(f"flaky: {anew} tests begin anew: they are made otherwise than when they ran", flush=True)

    def run(self, piece: Slice) -> None:
        """Run a slice beside the load, and write what became of it. Blocks until it ends, or the time does."""
        seed = random.randrange(2**32)
        options = ["-n", str(self._processes), "--dist", "worksteal", f"--randomly-seed={seed}"]
        options += ["--flaky-results", str(results())]
        if piece.wanted is not None:
            wanted = FOLDER / "slice.json"
            wanted.write_text(json.dumps(piece.wanted))
            options += ["--flaky-slice", str(wanted), *sorted({name.partition("::")[0] for name in piece.wanted})]
        began = time.monotonic()
        try:
            with load(self._burners):
                ended = self._pytest(*options)
        except BaseException:
            self._check(f"{piece.name} ran")
            self.keep(piece.name, f"stopped, seed {seed}")
            raise
        seconds = time.monotonic() - began
        self._check(f"{piece.name} ran")
        if ended and piece.wanted is None:
            self._record.full.append((round(seconds, 1), self._tested[1]))
        runs = self.keep(
            piece.name, f"{seconds:.0f} s, seed {seed}{'' if ended else ', stopped by the end of the time'}"
        )
        if ended and not runs:
            raise FlakyError(f"none of {piece.runs} runs of {piece.name} was made:\n{last_lines()}")

    def _check(self, when: str) -> None:
        """Raise where the files are others than at the start: nobody can tell which of them a run has seen."""
        if (product(), everything()) == self._tested:
            return
        failed = {line["test"]: line["text"] for line in read_results() if line["outcome"] == "failed"}
        for test, text in failed.items():
            print(f"  FAILED, and is not counted: {test}: {write_failure(test, text)}", flush=True)
        results().unlink(missing_ok=True)
        raise FlakyError(f"files were changed while {when}: those runs are not counted; start it again")

    def keep(self, name: str, how: str) -> int:
        """Count what the plugin has written by now, write the record, print a line; returns how many runs."""
        lines = read_results()
        runs, texts = self._record.add(lines)
        for test, text in texts.items():
            tested = self._record.tests[test]
            if not tested.first:
                tested.first = str(write_failure(test, text).relative_to(ROOT))
        said = f"{name}: {runs} runs, {len(texts)} tests failed, {how}"
        self._record.slices.append(said)
        self._record.write(FOLDER / "state.json")
        results().unlink(missing_ok=True)
        print(said, flush=True)
        for test in texts:
            print(f"  {test}: {self._record.tests[test].first}", flush=True)
        return runs

    def _pytest(self, *options: str) -> bool:
        """Whether it came to its end in time. It is stopped by an interrupt, once: it then ends its servers."""
        command = [sys.executable, "-m", "pytest", "-p", "tests.flaky.plugin", *options]
        with (FOLDER / "pytest.log").open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
            try:
                status = process.wait(None if self.left == float("inf") else max(0.0, self.left))
            except BaseException as stopped:
                seen = results().stat().st_size if results().exists() else 0
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(STOPPING_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                # What a test had started and could not end, because its own process was ended at once.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # A test whose servers go while it runs has not failed.
                if results().exists():
                    os.truncate(results(), seen)
                if isinstance(stopped, subprocess.TimeoutExpired):
                    return False
                raise
        if status not in (0, 1):
            raise FlakyError(f"pytest ended with status {status}:\n{last_lines()}")
        return True


def results() -> Path:
    """Where the plugin writes."""
    return FOLDER / "results.jsonl"


def read_results() -> list[dict[str, Any]]:
    """What it has written."""
    written = results().read_text().splitlines() if results().is_file() else []
    # The last line of a process that was killed may be half a line.
    return [json.loads(line) for line in written if line.endswith("}")]


def last_lines() -> str:
    """Of pytest's output."""
    return "\n".join((FOLDER / "pytest.log").read_text(errors="replace").splitlines()[-30:])


def write_failure(test: str, text: str) -> Path:
    """A file of its own, by the name of the test; those of the test before it was mended stay."""
    folder = FOLDER / "failures"
    folder.mkdir(exist_ok=True)
    name = re.sub(r"[^\w.-]+", "-", test.partition("::")[2])[:80]
    name = f"{name}-{hashlib.sha256(test.encode()).hexdigest()[:8]}"
    path = folder / f"{name}-{len(list(folder.glob(f'{glob.escape(name)}*'))) + 1}.txt"
    path.write_text(f"{test}\n\n{text}\n")
    return path


def record_of(tested: str, folder: Path = FOLDER) -> Record:
    """The record of this product: the one that is there, or a new one, and that of another product is put aside."""
    folder.mkdir(parents=True, exist_ok=True)
    record = Record.read(folder / "state.json")
    if record is not None and record.product != tested:
        aside = Path(tempfile.mkdtemp(prefix="before-", dir=folder))
        for name in ("state.json", "failures", "results.jsonl"):
            if (folder / name).exists():
                (folder / name).rename(aside / name)
        print(f"flaky: begun anew, for another product was tested: that record is now in {aside}", flush=True)
        record = None
    return record or Record(tested)


def plan(flaky: Flaky, record: Record, what: Sequence[str], *, repeats: int) -> Iterator[Slice]:
    """One slice after the other, for as long as there is time and something is missing."""
    paths = [one for one in what if one != "full"]

    def full() -> Iterator[Slice]:
        while record.full_missing() and flaky.left > max((each for each, _ in record.full), default=FULL_SECONDS):
            yield Slice(f"make test {len(record.full) + 1} of {FULL_RUNS}", None)

    if "full" in what:
        yield from full()
    while flaky.left > LEAST_SECONDS and not (what and not paths):
        piece = flaky.next_slice(paths, repeats=repeats)
        if piece is None:
            break
        yield piece
    if not what:
        yield from full()


def table(record: Record, *, repeats: int) -> str:
    """What was done of each group, what is missing, and what failed."""
    groups: dict[str, Counter[str]] = {}
    for name, one in record.tests.items():
        counted = groups.setdefault(group_of(name), Counter())
        counted += Counter(
            tests=bool(one.rule),
            runs=one.runs,
            missing=max(0, repeats - one.runs) if one.rule else 0,
            failures=one.failures,
        )
        groups[group_of(name)] = counted
    columns = ("tests", "runs", "missing", "failures")
    lines = [f"\n{'group':20}" + "".join(f"{column:>10}" for column in columns)]
    lines += [f"{name:20}" + "".join(f"{groups[name][column]:10}" for column in columns) for name in sorted(groups)]
    now = everything()
    lines.append(
        f"full runs: {len(record.full)} of {FULL_RUNS}, with all tests as they are now: "
        f"{sum(made == now for _, made in record.full)}"
    )
    lines += [f"mended since, FAILED {what}: {name}" for name, what in sorted(record.mended.items())]
    lines += [f"FAILED {one.failures} of {one.runs}: {name}: {one.first}" for name, one in record.failed().items()]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run and print; the exit status."""
    parser = argparse.ArgumentParser(prog="flaky", description="Tests again and again on a busy machine.")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N", help="in all (default: to the end)")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"of each test (default: {REPEATS})")
    parser.add_argument("--processes", type=int, default=3, metavar="N", help="of pytest (default: 3)")
    parser.add_argument("--load", type=int, default=2, metavar="N", help="processes that burn a core each (default: 2)")
    parser.add_argument("what", nargs="*", metavar="full | PATH", help="(default: everything)")
    options = parser.parse_args(arguments)
    for name, least in (("repeats", 1), ("processes", 1), ("load", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: must be {least} or more")
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds}: must be more than 0")
    unknown = [one for one in options.what if one != "full" and not (ROOT / one).exists()]
    if unknown:
        parser.error(f"{unknown[0]!r}: must be `full`, or a file or folder of the project, such as tests/runtime")
    # Also where they were ignored, as `make flaky &` in a script has it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    until = time.monotonic() + options.seconds
    FOLDER.mkdir(parents=True, exist_ok=True)
    with alone(FOLDER.parent / "flaky.lock", "the record of flaky tests"):
        record = record_of(product())
        flaky = Flaky(record, processes=options.processes, burners=options.load, until=until)
        status = 0
        try:
            if results().is_file():
                flaky.keep("an earlier start", "stopped")
            flaky.choose()
            rules = Counter(one.rule for one in record.tests.values() if one.rule)
            for rule in RULES:
                print(f"{rules[rule.name]:5} tests by the rule {rule.name}: {rule}", flush=True)
            for piece in plan(flaky, record, options.what, repeats=options.repeats):
                flaky.run(piece)
        except FlakyError as error:
            print(f"flaky: {error}", file=sys.stderr)
            status = 2
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        print(table(record, repeats=options.repeats), flush=True)
    return status or int(bool(record.failed()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
