"""Offset maps for tests: a second encoder, written from the description, and strategies for sets."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from hypothesis import strategies as st

from lanes.core.offset_map import OFFSETS_END

Runs = list[tuple[int, int]]

LIST, BITMAP = 0, 1


def offsets(runs: Iterable[tuple[int, int]]) -> set[int]:
    return {offset for start, end in runs for offset in range(start, end)}


def data_of(text: str) -> bytes:
    digits = "".join(format(ord(character) - 0x3400, "015b") for character in text)
    return bytes(int(digits[at : at + 8], 2) for at in range(0, len(digits) - 7, 8))


def text_of(data: bytes) -> str:
    digits = "".join(format(byte, "08b") for byte in data)
    digits += "0" * (-len(digits) % 15)
    return "".join(chr(0x3400 + int(digits[at : at + 15], 2)) for at in range(0, len(digits), 15))


def forged(
    body: bytes, *, form: int = LIST, floor: int = 0, magic: bytes = b"Lm\x01", longer: int = 0, check: int = 0
) -> str:
    """Encode these parts as ``encode`` does. ``longer`` falsifies the size, ``check`` the checksum."""
    length = 14 + len(body) + 4 + longer
    data = magic + bytes([form]) + length.to_bytes(2, "little") + floor.to_bytes(8, "little") + body
    return text_of(data + (crc32(data) ^ check).to_bytes(4, "little"))


def form_of(text: str) -> int:
    return data_of(text)[3]


@st.composite
def maps(draw: st.DrawFn, length: int = 60) -> tuple[int, Runs]:
    """A floor and runs above it: short and long, near and far, some touching."""
    floor = draw(st.sampled_from([0, 1, 1_000, 2**32, 2**63 - 1, 2**64 - 2**20]) | st.integers(0, 2**63))
    number = st.sampled_from([1, 1, 1, 2, 3, 127, 128, 129]) | st.integers(1, 20_000)
    runs = []
    last = floor
    for gap, run in draw(st.lists(st.tuples(number | st.just(0), number), max_size=length)):
        start, end = last + gap, last + gap + run
        if end <= OFFSETS_END:
            runs.append((start, end))
            last = end
    return floor, runs


@st.composite
def dense(draw: st.DrawFn) -> tuple[int, Runs]:
    """A floor and many short runs, which fit into a bitmap."""
    floor = draw(st.integers(0, 2**63))
    bits = draw(st.integers(0, 2**200))
    chosen = [floor + place for place in range(201) if bits >> place & 1]
    return floor, [(offset, offset + 1) for offset in chosen]


MAPS = st.one_of(maps(), dense())
