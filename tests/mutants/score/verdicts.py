"""The verdicts of earlier runs, and the lines that each test covers, in ``.cache/mutants.json``.

A verdict holds while the source of its function and the tests that decided it are unchanged. The digest of a test file
includes the helper modules of its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from tests.mutants.score.mutations import Mutation
from tests.mutants.score.targets import ROOT

PLACE: Final = ROOT / ".cache" / "mutants.json"


@dataclass
class Verdict:
    """The result of one mutation.

    Attributes:
        killed_by: The test that failed. Empty: the mutation survived.
        how: The way of the failure: ``test``, ``hang`` or ``crash``; empty for a survivor. ``impossible`` for a change
            that cannot be planted, and does not count.
        digests: Digests of the test files that decided: that of the test, or all that a survivor passed.
    """

    killed_by: str = ""
    how: str = ""
    digests: list[str] = field(default_factory=list)


@dataclass
class Covered:
    """One test without a mutation.

    Attributes:
        seconds: CPU time in seconds.
        lines: The executed lines of each mutated file.
        waited: Time in seconds, with the waits for a server.
    """

    seconds: float
    lines: dict[str, list[int]]
    waited: float = 0.0


class Verdicts:
    """All stored verdicts.

    Args:
        place: The file.
        root: The folder that test files are relative to.
        fresh: Whether to ignore stored verdicts.
    """

    def __init__(self, place: Path = PLACE, root: Path = ROOT, *, fresh: bool = False) -> None:
        self._place = place
        self._root = root
        self._digests: dict[str, str] = {}
        stored = json.loads(place.read_text()) if place.exists() else {}
        kept = {} if fresh else stored.get("verdicts", {})
        self._verdicts: dict[str, Verdict] = {key: Verdict(**each) for key, each in kept.items()}
        self._covered: dict[str, dict[str, Covered]] = {
            key: {test: Covered(**each) for test, each in tests.items()}
            for key, tests in stored.get("covered", {}).items()
        }

    def save(self) -> None:
        """Replace the file in one step."""
        self._place.parent.mkdir(parents=True, exist_ok=True)
        partial = self._place.with_suffix(".partial")
        stored = {
            "verdicts": {key: asdict(each) for key, each in self._verdicts.items()},
            "covered": {key: {t: asdict(c) for t, c in tests.items()} for key, tests in self._covered.items()},
        }
        partial.write_text(json.dumps(stored))
        os.replace(partial, self._place)

    def get(self, mutation: Mutation) -> Verdict | None:
        """Return the stored verdict. A verdict of ``killed`` holds only while the test is unchanged."""
        found = self._verdicts.get(_key(mutation))
        if found is not None and found.killed_by and found.digests != [self.digest(found.killed_by.split("::")[0])]:
            return None
        return found

    def put(self, mutation: Mutation, verdict: Verdict) -> None:
        self._verdicts[_key(mutation)] = verdict

    def covered(self, test_file: str, sources: str) -> dict[str, Covered] | None:
        """Return what each test of a file covers, if neither the file nor the mutated sources have changed."""
        return self._covered.get(f"{test_file} {self.digest(test_file)} {sources}")

    def cover(self, test_file: str, sources: str, covered: dict[str, Covered]) -> None:
        for key in [key for key in self._covered if key.startswith(f"{test_file} ")]:
            del self._covered[key]
        self._covered[f"{test_file} {self.digest(test_file)} {sources}"] = covered

    def digest(self, test_file: str) -> str:
        """Digest of a test file and its helpers. A file that is gone has the digest of no text."""
        if test_file not in self._digests:
            path = self._root / test_file
            text = path.read_bytes() if path.exists() else b""
            folder = "/".join(Path(test_file).parts[:2])
            self._digests[test_file] = digest(text, self._helpers.get(folder, "").encode())
        return self._digests[test_file]

    @cached_property
    def _helpers(self) -> dict[str, str]:
        """The digest of the helper modules of each folder of tests."""
        folders = [folder for folder in (self._root / "tests").iterdir() if folder.is_dir()]
        return {
            str(folder.relative_to(self._root)): digest(
                *(path.read_bytes() for path in sorted(folder.rglob("*.py")) if not path.name.startswith("test_"))
            )
            for folder in folders
        }


def digest(*texts: bytes) -> str:
    """Short digest of several texts."""
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def _key(mutation: Mutation) -> str:
    return f"{mutation.file} {mutation.source} {mutation.name}"
