"""A producer in Java routes 100,000 keys to the same partitions as ``lanes.PartitionedQueue``."""

from __future__ import annotations

import random
import subprocess

import pytest

from lanes import PartitionedQueue
from tests.components import MissingComponent
from tests.components.java_program import java_command
from tests.conftest import skip_or_fail

SECONDS = 240.0

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(900)]  # the first run fetches jars


def java_routes(queue: PartitionedQueue, keys: list[bytes]) -> list[tuple[int, str]]:
    try:
        command = java_command()
    except MissingComponent as missing:
        skip_or_fail(missing)
    done = subprocess.run(
        [*command, queue.name, str(queue.partitions)],
        input="".join(f"{key.hex()}\n" for key in keys),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pairs = (line.split(" ") for line in done.stdout.splitlines())
    return [(int(partition), name) for partition, name in pairs]


def test_java_and_python_route_the_same() -> None:
    chance = random.Random(1)
    keys = [b"", b"\0", *(b"customer-%d" % number for number in range(50_000))]
    keys += [number.to_bytes(16, "little") for number in range(25_000)]
    # BLAKE3 works in blocks of 64 bytes and chunks of 1,024 bytes, so keys around these lengths are of interest.
    keys += [chance.randbytes(length) for length in (63, 64, 65, 1_023, 1_024, 1_025, 2_048, 2_049, 4_097)]
    keys += [chance.randbytes(chance.randrange(1, 100)) for _ in range(100_000 - len(keys))]
    assert len(keys) == 100_000
    # A wide queue takes many jumps, and its partition says most about the digest.
    queue = PartitionedQueue("customer-updates", 32_767)
    expected = [(route.partition, route.name) for route in map(queue.route_by_key, keys)]
    assert java_routes(queue, keys) == expected
