"""The completed set above the floor as a short text, which rides in the metadata of a commit.

Who takes a partition over reads it back and does not run again what had finished. It is an optimisation: without
it, or with a part of it, finished work is repeated and nothing is lost. So an encoder may drop completions, the
highest first, and a decoder ignores a text at the slightest doubt.

**What limits it.** Kafka calls the limit ``offset.metadata.max.bytes`` (4,096), but its broker counts UTF-16 code
units, not bytes, and the client appends a NUL: 4,095 units are left. A character of the basic multilingual plane is
one unit, whatever its UTF-8 takes (here three bytes, 12,285 at most). 15 bits fit into one of the 32,768 characters
U+3400 … U+B3FF: no surrogate, no control character, all of them UTF-8. That is 2.5 times what base64 carries.

**The format**, before it is cut into characters of 15 bits, highest bit first, with zero bits at the end:

| bytes | what | how |
|---|---|---|
| 2 | magic | ``Lm`` |
| 1 | version | 1 |
| 1 | form | 0 = list of runs, 1 = bitmap: the smaller one, the list when they are equal |
| 2 | size | of all of it in bytes, little-endian |
| 8 | base | the floor, little-endian |
| … | set | see below |
| 4 | check | CRC-32 of all before it, little-endian |

A list has two numbers a run, as LEB128: its distance from the end of the run below, less one (for the first: from
the floor), and its length, less one. In a bitmap, offset base + n is bit n % 8 of byte n // 8, and the last byte is
not zero. So there is exactly one text for a set.

Runs may cover offsets that do not exist (compaction, transaction markers): nobody is ever given those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from zlib import crc32

__all__ = ["LIMIT", "OFFSETS_END", "decode", "encode"]

LIMIT: Final = 4_095
"""UTF-16 units that a broker with default settings takes beside the client's NUL."""

OFFSETS_END: Final = 1 << 64
"""Offsets are below it."""

_MAGIC: Final = b"Lm\x01"
_LIST: Final = 0
_BITMAP: Final = 1
_FORM_AT: Final = 3
_SIZE_AT: Final = 4
_BASE_AT: Final = 6
_SET_AT: Final = 14
_CHECK_BYTES: Final = 4
_OVERHEAD: Final = _SET_AT + _CHECK_BYTES

_CHARACTER_BITS: Final = 15
_FIRST_CHARACTER: Final = 0x3400
_LAST_CHARACTER: Final = _FIRST_CHARACTER + (1 << _CHARACTER_BITS) - 1

_VARINT_BYTES: Final = 10
"""Bytes of the longest LEB128 of a number below 2⁶⁴."""


def encode(floor: int, completed: Sequence[tuple[int, int]], limit: int = LIMIT) -> str:
    """The completed set as at most ``limit`` characters; "" for an empty one.

    ``completed``: runs (first offset, one behind the last), rising, at or above ``floor``, none empty; runs that
    touch are joined. Whatever spans up to 61,280 offsets fits into 4,095 characters. What does not fit loses its
    highest completions, and no more of them than it must.

    Raises ``ValueError`` for offsets outside 0 … 2⁶⁴−1, for runs that are not as above, and for a limit outside
    0 … 4,095. O(runs), bounded beyond that by ``limit``.
    """
    if not 0 <= limit <= LIMIT:
        raise ValueError(f"limit={limit}: a map takes 0 … {LIMIT} characters; give a limit in that range")
    room = limit * _CHARACTER_BITS // 8 - _OVERHEAD
    runs = _fitting(floor, _joined(floor, completed), room)
    if not runs:
        return ""
    form, body = _smaller(floor, runs)
    size = _OVERHEAD + len(body)
    data = b"".join((_MAGIC, bytes((form,)), size.to_bytes(2, "little"), floor.to_bytes(8, "little"), body))
    return _text(data + crc32(data).to_bytes(_CHECK_BYTES, "little"))


def decode(text: str, floor: int, max_ahead: int) -> list[tuple[int, int]] | None:
    """What ``encode`` made ``text`` of: rising runs that do not touch. None when there is any doubt.

    [] for "", which says that nothing above the floor is completed. None for foreign metadata, for another version,
    a damaged text, a map of another floor, one that ``encode`` would have written otherwise, and one that reaches
    beyond ``floor + max_ahead``. That bound counts offsets, gaps included; the end of the log less the floor is the
    one that cannot refuse a good map.

    Raises nothing, whatever the text. Its memory is bounded before the text is looked at: 4,095 characters are at
    most 30,640 runs, each two numbers however long it is; about 6 MB in all.
    """
    if not text:
        return []
    data = _data(text) if len(text) <= LIMIT else b""
    if len(data) <= _OVERHEAD or int.from_bytes(data[_BASE_AT:_SET_AT], "little") != floor:
        return None
    size = int.from_bytes(data[_SIZE_AT:_BASE_AT], "little")
    body = data[_SET_AT : max(size - _CHECK_BYTES, _SET_AT)]
    runs = _from_bitmap(floor, body) if data[_FORM_AT] == _BITMAP else _from_list(floor, body)
    if not runs or runs[-1][1] > min(floor + max_ahead, OFFSETS_END):
        return None
    # Magic, version, form, size and checksum need no look of their own: with any of them wrong, or with anything
    # said in a way that is not the shortest, the text is not the one there is for this set.
    return runs if encode(floor, runs) == text else None


def _joined(floor: int, completed: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The runs, those that touch made one."""
    if not 0 <= floor < OFFSETS_END:
        raise ValueError(f"floor={floor}: an offset is in 0 … 2**64-1; without one there is no map to encode")
    runs: list[tuple[int, int]] = []
    last = floor
    for start, end in completed:
        if not last <= start < end <= OFFSETS_END:
            raise ValueError(
                f"completed run ({start}, {end}) behind {last}, floor {floor}: runs rise from the floor, overlap "
                "nowhere, are not empty and end at 2**64; sort and merge them"
            )
        if runs and start == last:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
        last = end
    return runs


def _fitting(floor: int, runs: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
    """The longest part from the bottom whose smaller form takes no more than ``room`` bytes."""
    if not runs or _bitmap_size(floor, runs) <= room:
        return runs
    # Both forms hold a part from the bottom, so the one that gets further holds more.
    end = max(floor + 8 * room, _end_of_list(floor, runs, room))
    return [(start, min(stop, end)) for start, stop in runs if start < end]


def _end_of_list(floor: int, runs: list[tuple[int, int]], room: int) -> int:
    """Up to which offset ``room`` bytes can list the runs; the last run may be listed in part."""
    last = floor
    for start, end in runs:
        room -= _varint_size(_distance(floor, last, start))
        if room <= 0:
            break
        longest = 1 << 7 * min(room, _VARINT_BYTES)
        if end - start > longest:
            return start + longest
        room -= _varint_size(end - start - 1)
        last = end
    return last


def _distance(floor: int, last: int, start: int) -> int:
    """What is listed for a run at ``start`` behind ``last``: runs do not touch, only the first may be at the floor."""
    return start - last - (last > floor)


def _varint_size(number: int) -> int:
    return max(1, (number.bit_length() + 6) // 7)


def _smaller(floor: int, runs: list[tuple[int, int]]) -> tuple[int, bytes]:
    """The form that takes fewer bytes, and the set in it."""
    size = _bitmap_size(floor, runs)
    # A run that is listed takes two bytes or more: below that there is nothing to compare.
    if size >= 2 * len(runs):
        body = _listed(floor, runs)
        if len(body) <= size:
            return _LIST, body
    return _BITMAP, _bitmap(floor, runs)


def _listed(floor: int, runs: list[tuple[int, int]]) -> bytes:
    body = bytearray()
    last = floor
    for start, end in runs:
        for number in (_distance(floor, last, start), end - start - 1):
            while number > 0x7F:
                body.append(number & 0x7F | 0x80)
                number >>= 7
            body.append(number)
        last = end
    return bytes(body)


def _from_list(floor: int, body: bytes) -> list[tuple[int, int]]:
    """The runs of a list. Whatever is wrong with it shows when they are listed again."""
    numbers: list[int] = []
    number = shift = 0
    for byte in body:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    runs: list[tuple[int, int]] = []
    last = floor
    for distance, length in zip(numbers[::2], numbers[1::2], strict=False):
        start = last + distance + (last > floor)
        last = start + length + 1
        runs.append((start, last))
    return runs


def _bitmap_size(floor: int, runs: list[tuple[int, int]]) -> int:
    return (runs[-1][1] - floor + 7) // 8


def _bitmap(floor: int, runs: list[tuple[int, int]]) -> bytes:
    size = _bitmap_size(floor, runs)
    digits = bytearray(b"0" * (8 * size))
    for start, end in runs:
        digits[start - floor : end - floor] = b"1" * (end - start)
    digits.reverse()
    return int(digits, 2).to_bytes(size, "little")


def _from_bitmap(floor: int, body: bytes) -> list[tuple[int, int]]:
    # The zero behind the highest bit ends the last run.
    digits = f"0{int.from_bytes(body, 'little'):b}"[::-1]
    runs: list[tuple[int, int]] = []
    start = digits.find("1")
    while start >= 0:
        end = digits.find("0", start)
        runs.append((floor + start, floor + end))
        start = digits.find("1", end)
    return runs


def _text(data: bytes) -> str:
    """15 bits a character, zero bits at the end."""
    count = -(-8 * len(data) // _CHARACTER_BITS)
    digits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}".ljust(count * _CHARACTER_BITS, "0")
    return "".join(
        chr(_FIRST_CHARACTER + int(digits[at : at + _CHARACTER_BITS], 2))
        for at in range(0, len(digits), _CHARACTER_BITS)
    )


def _data(text: str) -> bytes:
    """The whole bytes in ``text``, perhaps with a zero one behind them; none where a character is foreign."""
    if not _FIRST_CHARACTER <= ord(min(text)) <= ord(max(text)) <= _LAST_CHARACTER:
        return b""
    digits = "".join(f"{ord(character) - _FIRST_CHARACTER:015b}" for character in text)
    size = len(digits) // 8
    return int(digits[: 8 * size], 2).to_bytes(size, "big")
