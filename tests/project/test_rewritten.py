"""The folders of tests are collected once, each by one process, before the workers of pytest start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project import rewritten


def test_each_folder_is_in_one_share_and_the_shares_are_about_equal() -> None:
    shares = rewritten.shares(rewritten.TESTS, 2)
    folders = [each for share in shares for each in share]
    assert sorted(folders) == sorted(
        each for each in rewritten.TESTS.iterdir() if each.is_dir() and any(each.rglob("*.py"))
    )
    sizes = [sum(file.stat().st_size for each in share for file in each.rglob("*.py")) for share in shares]
    assert max(sizes) < 1.1 * min(sizes)


def test_a_second_call_collects_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Started:
        def __init__(self, command: list[str], **options: object) -> None:
            started.append(command)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(rewritten, "DONE", tmp_path / "cache" / "rewritten")
    monkeypatch.setattr("tests.project.rewritten.subprocess.Popen", Started)
    assert rewritten.main() == 0
    assert len(started) == 2
    assert rewritten.main() == 0
    assert len(started) == 2
