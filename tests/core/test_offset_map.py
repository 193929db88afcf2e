"""The text of a completed set is decoded unchanged or ignored; a set above the limit loses its highest offsets."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from itertools import pairwise
from zlib import crc32

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lanes.core.offset_map import LIMIT, OFFSETS_END, decode, encode
from tests.core.offset_maps import BITMAP, LIST, MAPS, Runs, data_of, forged, form_of, offsets, text_of

FAR = OFFSETS_END


def size(runs: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in runs)


def joined(runs: Runs) -> Runs:
    starts = [start for start, _ in runs if start not in [end for _, end in runs]]
    ends = [end for _, end in runs if end not in [start for start, _ in runs]]
    return list(zip(starts, ends, strict=True))


def lowest(runs: Runs, count: int) -> Runs:
    """The lowest ``count`` offsets of the runs."""
    part = []
    for start, end in runs:
        if count > 0:
            part.append((start, min(end, start + count)))
        count -= end - start
    return part


LIMITS = st.integers(0, 40) | st.integers(0, LIMIT)


# The format.


def test_an_empty_offset_set_is_encoded_as_an_empty_text() -> None:
    assert encode(7, []) == ""
    assert decode("", 7, 0) == []


@pytest.mark.parametrize(
    ("floor", "runs", "form", "body"),
    [
        (5, [(5, 6)], BITMAP, b"\x01"),
        (5, [(6, 9)], BITMAP, b"\x0e"),
        (5, [(5, 13)], BITMAP, b"\xff"),
        (5, [(5, 14)], LIST, b"\x00\x08"),
        (5, [(6, 9), (10, 11)], BITMAP, b"\x2e"),
        (0, [(1, 2), (300, 428)], LIST, b"\x01\x00\xa9\x02\x7f"),
        (0, [(1, 2), (300, 429)], LIST, b"\x01\x00\xa9\x02\x80\x01"),
        # The smaller form is chosen, and the list if both forms have four bytes.
        (0, [(1, 2), (3, 24)], BITMAP, b"\xfa\xff\xff"),
        (0, [(1, 2), (3, 25)], LIST, b"\x01\x00\x00\x15"),
        (0, [(1, 2), (3, 33)], LIST, b"\x01\x00\x00\x1d"),
        (0, [(15, 16)], LIST, b"\x0f\x00"),
        (0, [(0, OFFSETS_END)], LIST, b"\x00" + b"\xff" * 9 + b"\x01"),
        (OFFSETS_END - 1, [(OFFSETS_END - 1, OFFSETS_END)], BITMAP, b"\x01"),
    ],
)
def test_known_sets_have_the_same_text_in_every_version(floor: int, runs: Runs, form: int, body: bytes) -> None:
    text = encode(floor, runs)
    assert text == forged(body, form=form, floor=floor)
    assert decode(text, floor, FAR) == runs


def test_the_text_of_the_example_set_stays_the_same() -> None:
    # An older version of this package must be able to read the text.
    assert encode(5, [(6, 9), (10, 11)]) == "\u5a36\u7440\u5660\u3450\u3400\u3400\u3400\u342e\u8a28\u9b21\u3400"


def test_a_list_of_many_runs_may_be_larger_than_a_bitmap() -> None:
    # The bitmap has 20 bytes. The list has 21: ten runs are 20 numbers, and one distance takes two bytes.
    runs = [*((offset, offset + 1) for offset in range(1, 18, 2)), (150, 160)]
    assert form_of(encode(0, runs)) == BITMAP
    assert form_of(encode(0, [*runs[:-1], (150, 161)])) == LIST


@given(MAPS)
def test_an_offset_set_is_equal_after_encoding_and_decoding(case: tuple[int, Runs]) -> None:
    floor, runs = case
    text = encode(floor, runs)
    assert decode(text, floor, FAR) == joined(runs)
    assert encode(floor, joined(runs)) == text


def list_size(floor: int, runs: Runs) -> int:
    numbers = [end - start - 1 for start, end in runs]
    numbers += [above[0] - below[1] - 1 for below, above in pairwise(runs)]
    numbers += [start - floor for start, _ in runs[:1]]
    return sum(next(count for count in range(1, 11) if number < 128**count) for number in numbers)


@given(MAPS)
def test_an_offset_set_is_encoded_in_the_smaller_of_its_two_forms(case: tuple[int, Runs]) -> None:
    floor, runs = case
    assume(runs)
    text = encode(floor, runs)
    bitmap, listed = -(-(runs[-1][1] - floor) // 8), list_size(floor, joined(runs))
    assert form_of(text) == (BITMAP if bitmap < listed else LIST)
    assert len(text) == -(-8 * (18 + min(bitmap, listed)) // 15)


@given(MAPS, LIMITS)
def test_every_character_is_one_utf16_unit_and_valid_utf8(case: tuple[int, Runs], limit: int) -> None:
    text = encode(*case, limit)
    assert len(text.encode("utf-16-le")) == 2 * len(text) <= 2 * limit
    assert text.encode().decode() == text
    assert all(0x3400 <= ord(character) <= 0xB3FF for character in text)


# The limit.


def test_a_bitmap_of_60_000_fits() -> None:
    alternating = [(offset, offset + 1) for offset in range(10**12 + 1, 10**12 + 60_000, 2)]
    text = encode(10**12, alternating)
    assert form_of(text) == BITMAP
    assert decode(text, 10**12, 60_000) == alternating
    assert len(text) <= LIMIT


def test_the_largest_bitmap_fits() -> None:
    runs = [(offset, offset + 1) for offset in range(1, 80_000, 2)]
    assert decode(encode(0, runs), 0, FAR) == [run for run in runs if run[1] <= 61_280]


def test_the_largest_list_fits() -> None:
    # Two bytes of distance and one of length: 7,660 bytes are 2,553 runs and a byte.
    runs = [(1_000 * number, 1_000 * number + 3) for number in range(1, 4_000)]
    assert decode(encode(0, runs), 0, FAR) == runs[:2_553]


@given(MAPS, LIMITS)
def test_a_set_that_does_not_fit_loses_its_highest_offsets(case: tuple[int, Runs], limit: int) -> None:
    floor, runs = case
    text = encode(floor, runs, limit)
    kept = decode(text, floor, FAR)
    assert kept is not None
    assert len(text) <= limit
    assert kept == lowest(joined(runs), size(kept))


@given(MAPS, LIMITS)
def test_a_set_loses_no_more_than_necessary(case: tuple[int, Runs], limit: int) -> None:
    floor, runs = case
    kept = decode(encode(floor, runs, limit), floor, FAR)
    assert kept is not None
    if size(kept) < size(runs):
        more = lowest(joined(runs), size(kept) + 1)
        assert len(encode(floor, more)) > limit


@pytest.mark.parametrize(
    ("limit", "start", "kept"),
    [
        # The fixed part has 18 bytes: 10 characters leave no byte for the set, 11 leave two, and 12 leave four.
        (0, 100, []),
        (9, 100, []),
        (10, 100, []),
        (11, 100, [(100, 228)]),
        (11, 127, [(127, 255)]),
        (11, 128, []),
        (12, 128, [(128, 5_128)]),
        (11, 0, [(0, 128)]),
    ],
)
def test_an_offset_set_that_does_not_fit_may_lose_a_part_of_its_last_run(limit: int, start: int, kept: Runs) -> None:
    assert decode(encode(0, [(start, start + 5_000)], limit), 0, FAR) == kept


def test_of_two_cut_forms_the_one_with_the_higher_last_offset_is_kept() -> None:
    # Two bytes hold 16 bits of a bitmap, or one run of a list.
    assert decode(encode(0, [(1, 2), (4, 5), (9, 30)], 11), 0, FAR) == [(1, 2), (4, 5), (9, 16)]
    assert decode(encode(0, [(1, 20), (40, 50)], 11), 0, FAR) == [(1, 20)]


def test_a_lower_limit_gives_the_text_of_the_kept_set() -> None:
    runs = [(100 * number, 100 * number + 1) for number in range(1, 500)]
    text = encode(0, runs, 300)
    kept = decode(text, 0, FAR)
    assert kept is not None
    assert 0 < len(kept) < 499
    assert encode(0, kept) == text


@pytest.mark.parametrize("limit", [-1, LIMIT + 1])
def test_a_limit_out_of_range_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=rf"limit={limit}: .* 0 … 4095 .* in that range"):
        encode(0, [], limit)


@pytest.mark.parametrize("floor", [-1, -1001, OFFSETS_END])
def test_a_floor_out_of_range_is_refused_and_decodes_to_nothing(floor: int) -> None:
    with pytest.raises(ValueError, match=f"floor={floor}: an offset is in"):
        encode(floor, [])
    near = floor % OFFSETS_END
    assert decode(encode(near, [(near, near + 1)]), floor, FAR) is None


@pytest.mark.parametrize(
    "runs",
    [
        [(9, 11)],
        [(10, 10)],
        [(12, 11)],
        [(20, 22), (21, 23)],
        [(20, 22), (11, 12)],
        [(20, 22), (20, 22)],
        [(20, OFFSETS_END + 1)],
    ],
)
def test_invalid_runs_are_refused(runs: Runs) -> None:
    with pytest.raises(ValueError, match=r"completed run .* floor 10: .* sort and merge them"):
        encode(10, runs)


# Invalid texts.

GOOD = encode(5, [(6, 9), (10, 11)])


def test_the_encoder_of_the_tests_agrees_with_the_encoder_of_the_adapter() -> None:
    assert forged(b"\x2e", form=BITMAP, floor=5) == GOOD
    assert text_of(data_of(GOOD)) == GOOD


@pytest.mark.parametrize(
    "text",
    [
        forged(b"\x2e", form=BITMAP, floor=5, magic=b"lm\x01"),
        forged(b"\x2e", form=BITMAP, floor=5, magic=b"Lm\x00"),
        forged(b"\x2e", form=BITMAP, floor=5, magic=b"Lm\x02"),
        forged(b"\x2e", form=BITMAP, floor=5, check=1),
        forged(b"\x2e", form=BITMAP, floor=5, check=1 << 31),
        forged(b"\x2e", form=BITMAP, floor=6),
        forged(b"\x2e", form=BITMAP, floor=5, longer=1),
        forged(b"\x2e", form=BITMAP, floor=5, longer=-1),
        forged(b"\x2e", form=BITMAP, floor=5, longer=-19),
        forged(b"\x2e", form=BITMAP, floor=5, longer=2**16 - 20),
        # An unknown form, or a set that has a shorter text.
        forged(b"\x2e", form=2, floor=5),
        forged(b"\x01\x02", form=2, floor=5),
        forged(b"\x2e\x00", form=BITMAP, floor=5),
        forged(b"\x0e", form=LIST, floor=5),
        forged(b"\x01\x02\x00\x00", form=LIST, floor=5),
        forged(b"\xff" * 3, form=BITMAP, floor=5),
        forged(b"\x00", form=BITMAP, floor=5),
        forged(b"", form=BITMAP, floor=5),
        forged(b"", form=LIST, floor=5),
        # Numbers that are cut, too long, or unpaired.
        forged(b"\x81\x00\x02", floor=5),
        forged(b"\x01\x82\x00", floor=5),
        forged(b"\x01\x82\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00", floor=5),
        forged(b"\x01\x02\x80", floor=5),
        forged(b"\x01\x02\x05", floor=5),
        forged(b"\x01", floor=5),
        forged(b"\x80", floor=5),
        forged(b"\x80" * 7_000, floor=5),
        forged(b"\xff" * 7_000, floor=5),
        forged(b"\x01" + b"\xff" * 9 + b"\x01", floor=5),
        forged(b"\x01" + b"\xff" * 9 + b"\x7f", floor=5),
        # Foreign texts.
        "a",
        "㐀",
        "\x00",
        "AgAAAYkF3yQ=",
        '{"offset": 5}',
        "\ud800",
        "㐀" * 12,
        "\U00020000" * 12,
        "x" * 10**6,
        GOOD + "\x00",
        " " + GOOD,
        GOOD * 2,
        GOOD + "㐀" * 4_096,
    ],
    ids=lambda text: f"{len(text)}-{crc32(text.encode('utf-8', 'surrogatepass')):08x}",
)
def test_an_invalid_text_is_ignored(text: str) -> None:
    assert decode(text, 5, FAR) is None


def test_an_offset_map_with_bits_after_its_last_byte_is_refused() -> None:
    spare = 15 * len(GOOD) - 8 * 19
    assert spare == 13
    for bit in range(spare):
        assert decode(GOOD[:-1] + chr(ord(GOOD[-1]) + (1 << bit)), 5, FAR) is None


def test_an_offset_map_of_another_floor_is_ignored() -> None:
    assert decode(GOOD, 5, FAR) == [(6, 9), (10, 11)]
    for floor in (4, 6, 5 + 2**64, 5 - 2**64):
        assert decode(GOOD, floor, FAR) is None


@pytest.mark.parametrize("runs", [[(6, 9), (10, 11)], [(905, 1_005)]])
def test_a_map_that_reaches_too_far_is_ignored(runs: Runs) -> None:
    text = encode(5, runs)
    reach = runs[-1][1] - 5
    assert decode(text, 5, reach) == runs
    assert decode(text, 5, reach - 1) is None
    assert decode(text, 5, -1) is None


def test_a_run_of_any_length_is_encoded_as_two_numbers() -> None:
    runs = [(10**15, 2**62)]
    assert decode(encode(3, runs), 3, 2**62) == runs


@pytest.mark.parametrize(
    ("text", "most"),
    [
        # A megabyte of text is not decoded; a short text has the documented bound.
        (GOOD + "㐀" * 10**6, 10_000),
        (encode(5, [(offset, offset + 1) for offset in range(6, 80_000, 2)]), 8_000_000),
        (forged(b"\x80" * 7_600, floor=5), 1_000_000),
        (forged(b"\x00\x00" * 3_800, floor=5), 3_000_000),
        (forged(b"\xff" * 9 + b"\x01" + b"\xff" * 7_500, form=BITMAP, floor=5), 1_000_000),
    ],
    ids=["longer", "fullest", "number", "list", "bitmap"],
)
def test_a_hostile_text_is_decoded_in_bounded_memory(text: str, most: int) -> None:
    tracemalloc.start()
    try:
        decode(text, 5, FAR)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most


@given(MAPS, st.data())
def test_one_changed_character_is_detected(case: tuple[int, Runs], data: st.DataObject) -> None:
    floor, runs = case
    text = encode(floor, runs)
    assume(text)
    place = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.integers(0x3400, 0xB3FF).map(chr) | st.characters())
    assume(character != text[place])
    assert decode(text[:place] + character + text[place + 1 :], floor, FAR) is None


def test_any_flipped_bit_is_detected() -> None:
    for text, floor in ((GOOD, 5), (encode(7, [(10**6, 2 * 10**6)]), 7)):
        for place, character in enumerate(text):
            for bit in range(15):
                flipped = chr((ord(character) - 0x3400 ^ 1 << bit) + 0x3400)
                assert decode(text[:place] + flipped + text[place + 1 :], floor, FAR) is None


@given(MAPS, st.data())
def test_a_cut_or_longer_text_is_detected(case: tuple[int, Runs], data: st.DataObject) -> None:
    floor, runs = case
    text = encode(floor, runs)
    assume(text)
    # "" is the text of an empty set, so it is no part of a map.
    assert decode(text[: data.draw(st.integers(1, len(text) - 1))], floor, FAR) is None
    more = data.draw(
        st.text(min_size=1) | st.text(st.characters(min_codepoint=0x3400, max_codepoint=0xB3FF), min_size=1)
    )
    assert decode(text + more, floor, FAR) is None
    assert decode(more + text, floor, FAR) is None


@given(
    st.text() | st.text(st.characters(min_codepoint=0x3400, max_codepoint=0xB3FF)),
    st.integers(0, 2**64) | st.just(0),
)
def test_random_text_is_ignored(text: str, floor: int) -> None:
    assert decode(text, floor, FAR) == (None if text else [])


@given(st.binary(max_size=30), st.sampled_from([LIST, BITMAP]), st.sampled_from([0, 5, 2**64 - 9]), st.integers(0, 400))
def test_a_forged_offset_set_is_decoded_within_its_bounds_or_ignored(
    body: bytes, form: int, floor: int, reach: int
) -> None:
    text = forged(body, form=form, floor=floor)
    runs = decode(text, floor, reach)
    if runs is not None:
        assert runs
        assert floor <= runs[0][0]
        assert runs[-1][1] <= min(floor + reach, OFFSETS_END)
        assert all(start < end for start, end in runs)
        assert all(below[1] < above[0] for below, above in pairwise(runs))
        assert encode(floor, runs) == text
        if form == BITMAP:
            bits = {floor + place for place in range(8 * len(body)) if body[place // 8] >> place % 8 & 1}
            assert offsets(runs) == bits
