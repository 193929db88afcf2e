"""The memory and the cores of a machine for Spark are read, and its workers get the same Python and folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lanes_spark.cli.machine import cores_of, memory_limit, size, worker_environment


@pytest.mark.parametrize(
    ("files", "limit", "bound"),
    [
        ({}, 8 * 1024**3, "this machine"),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 8 * 1024**3, "this machine"),
        ({"sys/fs/cgroup/memory.max": "2147483648\n"}, 2 * 1024**3, "the limit of this container"),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "1024",
                "sys/fs/cgroup/a/b/memory.max": "9999",
            },
            1024,
            "the limit of this container",
        ),
        (
            {"proc/self/cgroup": "4:cpu,memory:/d\n", "sys/fs/cgroup/memory/d/memory.limit_in_bytes": "4096"},
            4096,
            "the limit of this container",
        ),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 8 * 1024**3, "this machine"),
    ],
)
def test_the_memory_limit_is_that_of_the_machine_or_its_container(
    tmp_path: Path, files: dict[str, str], limit: int, bound: str
) -> None:
    for name, text in ({"proc/meminfo": "MemTotal:        8388608 kB\nMemFree: 1 kB\n"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == (limit, bound)


def test_sizes_and_cores_are_parsed_like_by_spark() -> None:
    mib = 1024**2
    assert [size(text) for text in ("512m", "2g", "1024", "1k", "3GB", "x", "")] == [
        512 * mib,
        2048 * mib,
        1024 * mib,
        1024,
        3072 * mib,
        None,
        None,
    ]
    assert [cores_of(master) for master in ("local", "local[3]", "local[2, 4]", "local-cluster[3,2,1024]")] == [
        1,
        3,
        2,
        6,
    ]
    assert cores_of("") == cores_of("local[*]") >= 1


def test_workers_of_this_machine_get_this_python_and_folder() -> None:
    added = worker_environment("local[2]", {"PYTHONPATH": "a"}, "here")
    assert added == {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": f"here{os.pathsep}a"}
    assert worker_environment("", {"PYSPARK_PYTHON": "mine"}, "here")["PYSPARK_PYTHON"] == "mine"
    assert worker_environment("yarn", {}, "here") == {}
