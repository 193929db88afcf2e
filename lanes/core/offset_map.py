"""The completed set above the floor as a short text for the metadata of a commit.

The next owner of a partition reads the text and does not repeat finished messages. The text is only an optimisation. If
the text is missing or incomplete, the next owner handles some finished messages again, but loses no message. An encoder
may therefore drop completed offsets, the highest first. A decoder ignores an invalid text.

**The limit** is Kafka's setting ``offset.metadata.max.bytes`` (4,096). A Kafka broker counts UTF-16 code units, not
bytes, and the client appends a NUL. The text may therefore have 4,095 units. A character of the basic multilingual
plane is one unit, although its UTF-8 may have three bytes (12,285 bytes in all). Each of the 32,768 characters U+3400 …
U+B3FF carries 15 bits, and none of them is a surrogate or a control character. The capacity is 2.5 times the capacity
of base64.

**The format** is a sequence of bytes. The encoder divides the bits into groups of 15, highest bit first, with zero bits
at the end. Each group is one character:

| bytes | field | value |
|---|---|---|
| 2 | magic | ``Lm`` |
| 1 | version | 1 |
| 1 | form | 0 = list of runs, 1 = bitmap. The encoder uses the smaller form, and the list if both are equal |
| 2 | size | size of the whole map in bytes, little-endian |
| 8 | base | the floor, little-endian |
| … | set | the list or the bitmap, see below |
| 4 | check | CRC-32 of all bytes before this field, little-endian |

A list has two LEB128 numbers for each run. The first number is the distance from the end of the run below, minus one.
For the lowest run, the first number is the distance from the floor. The second number is the length of the run, minus
one. In a bitmap, offset base + n is bit n % 8 of byte n // 8, and the last byte is not zero. Each set therefore has
exactly one text. Runs may include offsets without a message, which compaction and transaction markers leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from zlib import crc32

LIMIT: Final = 4_095
"""Number of UTF-16 units that a broker with default settings accepts, without the NUL of the client."""

OFFSETS_END: Final = 1 << 64
"""The first number that is no offset."""

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
"""Bytes of the longest LEB128 number below 2⁶⁴."""


def encode(floor: int, completed: Sequence[tuple[int, int]], limit: int = LIMIT) -> str:
    """Encode the completed set. A set that spans up to 61,280 offsets fits into 4,095 characters. O(runs).

    Args:
        floor: The committed offset.
        completed: Half-open runs of offsets at or above ``floor``, in rising order, none empty. The function joins runs
            that touch.
        limit: Maximum number of characters, 0 … 4,095.

    Returns:
        The text; "" for an empty set. If a set does not fit, the text omits as few as possible of its highest offsets.

    Raises:
        ValueError: An offset is outside 0 … 2⁶⁴−1, the runs are invalid, or the limit is out of its range.
    """
    if not 0 <= limit <= LIMIT:
        raise ValueError(f"limit={limit}: a map has 0 … {LIMIT} characters; use a limit in that range")
    room = limit * _CHARACTER_BITS // 8 - _OVERHEAD
    runs = _fitting(floor, _joined(floor, completed), room)
    if not runs:
        return ""
    form, body = _smaller(floor, runs)
    size = _OVERHEAD + len(body)
    data = b"".join((_MAGIC, bytes((form,)), size.to_bytes(2, "little"), floor.to_bytes(8, "little"), body))
    return _text(data + crc32(data).to_bytes(_CHECK_BYTES, "little"))


def decode(text: str, floor: int, max_ahead: int) -> list[tuple[int, int]] | None:
    """Decode a text of ``encode``. The function raises no error for any text.

    The memory of the result is bounded: 4,095 characters are at most 30,640 runs of two numbers each, about 6 MB.

    Args:
        text: Metadata of a commit.
        floor: The committed offset.
        max_ahead: Maximum distance from the floor to an offset, gaps included. If the bound is the distance from the
            floor to the end of the log, the function accepts every valid text.

    Returns:
        Runs in ascending order, which do not touch; [] for "". ``None`` = the text is foreign, damaged, of another
        version or of another floor, reaches beyond ``floor + max_ahead``, or differs from the text that ``encode``
        returns.
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
    # This also checks magic, version, form, size and checksum: a set has exactly one text.
    return runs if encode(floor, runs) == text else None


def _joined(floor: int, completed: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join runs that touch."""
    if not 0 <= floor < OFFSETS_END:
        raise ValueError(f"floor={floor}: an offset is in 0 … 2**64-1; use a floor in that range")
    runs: list[tuple[int, int]] = []
    last = floor
    for start, end in completed:
        if not last <= start < end <= OFFSETS_END:
            raise ValueError(
                f"completed run ({start}, {end}) after {last}, floor {floor}: runs must rise from the floor up to "
                "2**64 without overlap, and none may be empty; sort and merge them"
            )
        if runs and start == last:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
        last = end
    return runs


def _fitting(floor: int, runs: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
    """Return the longest lower part of the runs that fits into ``room`` bytes in one of the forms."""
    if not runs or _bitmap_size(floor, runs) <= room:
        return runs
    # The list and the bitmap hold a lower part of the set, so the form that reaches further holds more.
    end = max(floor + 8 * room, _end_of_list(floor, runs, room))
    return [(start, min(stop, end)) for start, stop in runs if start < end]


def _end_of_list(floor: int, runs: list[tuple[int, int]], room: int) -> int:
    """Return the offset up to which ``room`` bytes can list the runs. The last run may be cut."""
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
    """Return the distance that the list form stores for a run at ``start``, from the end ``last`` of the former run.

    The stored distance of every run but the first is one lower, because two runs never touch.
    """
    return start - last - (last > floor)


def _varint_size(number: int) -> int:
    return max(1, (number.bit_length() + 6) // 7)


def _smaller(floor: int, runs: list[tuple[int, int]]) -> tuple[int, bytes]:
    """Encode the runs as a list or as a bitmap, and return the shorter form and its bytes."""
    size = _bitmap_size(floor, runs)
    # In a list each run takes at least two bytes, so a bitmap below that size is the shorter form.
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
    """Return the runs of a list. ``decode`` finds an invalid list by encoding the runs again."""
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
    # The zero after the highest bit ends the last run.
    digits = f"0{int.from_bytes(body, 'little'):b}"[::-1]
    runs: list[tuple[int, int]] = []
    start = digits.find("1")
    while start >= 0:
        end = digits.find("0", start)
        runs.append((floor + start, floor + end))
        start = digits.find("1", end)
    return runs


def _text(data: bytes) -> str:
    """Cut the bytes into characters of 15 bits, with zero bits at the end."""
    count = -(-8 * len(data) // _CHARACTER_BITS)
    digits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}".ljust(count * _CHARACTER_BITS, "0")
    return "".join(
        chr(_FIRST_CHARACTER + int(digits[at : at + _CHARACTER_BITS], 2))
        for at in range(0, len(digits), _CHARACTER_BITS)
    )


def _data(text: str) -> bytes:
    """Return the complete bytes of ``text``, possibly with a zero byte after them.

    If a character is not one of the format's characters, return no bytes.
    """
    if not _FIRST_CHARACTER <= ord(min(text)) <= ord(max(text)) <= _LAST_CHARACTER:
        return b""
    digits = "".join(f"{ord(character) - _FIRST_CHARACTER:015b}" for character in text)
    size = len(digits) // 8
    return int(digits[: 8 * size], 2).to_bytes(size, "big")
