"""Decoding any text gives either nothing or exactly the encoded set, within the bounds of an offset map."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.core.offset_map import LIMIT, OFFSETS_END, decode, encode
from tests.core.offset_maps import BITMAP, LIST, MAPS, Runs, data_of, forged, offsets

OURS = st.characters(min_codepoint=0x3400, max_codepoint=0xB3FF)
ANY = st.one_of(OURS, st.characters(), st.characters(categories=["Cs"]))
FLOORS = st.sampled_from([0, 1, 5, 2**63 - 1, 2**64 - 9, 2**64 - 1]) | st.integers(0, 2**64 - 1)
# Bytes of encoded numbers, so that examples have long lists and huge numbers.
BODIES = st.binary(max_size=40) | st.lists(
    st.sampled_from([b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff", b"\xff" * 9 + b"\x01", b"\x80" * 12]), max_size=20
).map(b"".join)


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, int, Runs]:
    """Return a real text with a part replaced, removed or repeated, and the floor and the runs of the real text."""
    floor, runs = draw(MAPS)
    text = encode(floor, runs, draw(st.sampled_from([LIMIT, LIMIT, 12, 20, 40])))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.sampled_from([start, start + 1, start + 2, len(text)]) | st.integers(start, len(text)))
        text = text[:start] + draw(st.text(ANY, max_size=3) | st.just(text[start:end] * 2)) + text[end:]
    return text, floor, runs


def check_changed(text: str, floor: int, runs: Runs) -> None:
    """Check that a changed text completes only positions that the original text completes."""
    for start, end in decode(text, floor, OFFSETS_END) or []:
        assert any(first <= start < end <= last for first, last in merged(runs))


def merged(runs: Runs) -> Runs:
    """Return the runs, with touching runs merged."""
    inner = {end for _, end in runs} & {start for start, _ in runs}
    starts = [start for start, _ in runs if start not in inner]
    return list(zip(starts, [end for _, end in runs if end not in inner], strict=True))


def check_forged(body: bytes, form: int, floor: int, reach: int, falsified: int) -> None:
    """Check a text with any set, and with a size that is wrong by ``falsified`` bytes."""
    text = forged(body, form=form, floor=floor, longer=falsified)
    runs = decode(text, floor, reach)
    if runs is None:
        return
    assert falsified == 0 and form in (LIST, BITMAP)
    assert floor <= runs[0][0]
    assert runs[-1][1] <= min(floor + reach, OFFSETS_END)
    assert all(start < end for start, end in runs)
    assert all(below[1] < above[0] for below, above in pairwise(runs))
    if form == BITMAP:
        assert offsets(runs) == {floor + n for n in range(8 * len(body)) if body[n // 8] >> n % 8 & 1}
    else:
        assert [number for run in distances(floor, runs) for number in run] == numbers(body)


def distances(floor: int, runs: Runs) -> Runs:
    """Return the two numbers that the list form stores for each run."""
    ends = [floor - 1, *(end for _, end in runs)]
    return [(start - end - 1, stop - start - 1) for (start, stop), end in zip(runs, ends, strict=False)]


def numbers(body: bytes) -> list[int]:
    """Return all numbers that the list form stores in ``body``."""
    found, digits = [], ""
    for byte in body:
        digits = f"{byte & 127:07b}" + digits
        if byte < 128:
            found.append(int(digits, 2))
            digits = ""
    assert digits == ""
    return found


def check_hostile(text: str, floor: int) -> None:
    """Decode a text that any client may have written, and compare a decoded set with the set in the text."""
    runs = decode(text, floor, OFFSETS_END)
    if runs:
        assert data_of(text)[:3] == b"Lm\x01"
        assert encode(floor, runs) == text
    else:
        assert runs == (None if text else [])


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Return tests of changed texts, forged texts and any texts."""

    @effort
    @given(changed())
    def changes(case: tuple[str, int, Runs]) -> None:
        tick()
        check_changed(*case)

    @effort
    @given(
        BODIES, st.integers(0, 2), FLOORS, st.integers(0, 400) | st.just(OFFSETS_END), st.sampled_from([0, 0, 1, -1])
    )
    def forgeries(body: bytes, form: int, floor: int, reach: int, falsified: int) -> None:
        tick()
        check_forged(body, form, floor, reach, falsified)

    @effort
    @given(st.text(ANY, max_size=60) | st.text(OURS, max_size=20).map("\u5a36\u7440".__add__), FLOORS)
    def hostile(text: str, floor: int) -> None:
        tick()
        check_hostile(text, floor)

    return [changes, forgeries, hostile]
