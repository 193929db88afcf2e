"""Draws one_partition.svg: one partition of three keys, one of them stuck, and the committed position.

Run the program after you change it: python docs/pictures/lanes_picture.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

__all__ = ["PICTURE", "draw"]

PICTURE: Final = Path(__file__).with_name("one_partition.svg")

State = Literal["finished", "running", "retried", "waiting"]

FIRST: Final = 40
MESSAGES: Final[list[tuple[str, State]]] = [
    ("ann", "finished"),
    ("eve", "finished"),
    ("bob", "retried"),
    ("ann", "finished"),
    ("eve", "finished"),
    ("ann", "finished"),
    ("bob", "waiting"),
    ("eve", "finished"),
    ("ann", "running"),
    ("bob", "waiting"),
    ("eve", "finished"),
    ("eve", "running"),
]
"""Key and state of each message, from offset ``FIRST`` on."""

COMMITTED: Final = FIRST + [state for _, state in MESSAGES].index("retried")
KEYS: Final = ("ann", "bob", "eve")

# Middle tones: each has a contrast of at least 3 with a white page and with a dark one.
INK: Final = "#767676"
FILLS: Final[dict[State, str]] = {
    "finished": "#3b8050",
    "running": "#3c76c0",
    "retried": "#c4512d",
    "waiting": "none",
}
LEGEND: Final[dict[State, str]] = {
    "finished": "finished",
    "running": "handler runs",
    "retried": "fails, is retried",
    "waiting": "waits for its key",
}

LEFT, CELL, HEIGHT, GAP = 92, 46, 32, 4
PARTITION_TOP, LANES_TOP, LANE = 60, 150, 44
LEGEND_TOP: Final = LANES_TOP + len(KEYS) * LANE + 14
WIDTH, BOTTOM = LEFT + len(MESSAGES) * CELL + 8, LEGEND_TOP + 30


def draw() -> str:
    """Return the picture as the text of an SVG file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BOTTOM}" role="img" '
        'aria-labelledby="title what" font-family="system-ui, sans-serif" font-size="14">'
    )
    what = (
        f"The messages of a partition, from offset {FIRST} on, run in one lane for each key. Offset {COMMITTED} of bob "
        "fails and is retried, so the later messages of bob wait. The lanes of ann and eve go on. The committed "
        f"position stays at {COMMITTED}."
    )
    names = ['<title id="title">One partition, three keys</title>', f'<desc id="what">{what}</desc>']
    return "\n".join([head, *names, *_commit(), *_partition(), *_lanes(), *_legend(), "</svg>\n"])


def _commit() -> Iterator[str]:
    """Draw the committed position, and the finished messages above the committed position."""
    at = _x(COMMITTED) - GAP / 2
    end = _x(FIRST + len(MESSAGES)) - GAP
    yield _text(at + 8, 22, f"committed position: {COMMITTED}", weight="bold", fill=FILLS["retried"])
    yield _text(at + 8, 42, "The commit lists the finished messages above it.")
    yield f'<path d="M{at:g} 8V{PARTITION_TOP + HEIGHT + 8}" stroke="{FILLS["retried"]}" stroke-width="3"/>'
    yield f'<path d="M{at + 8:g} 50H{end:g}" stroke="{INK}" stroke-width="1.5"/>'


def _partition() -> Iterator[str]:
    """Draw the messages of the partition in the order of delivery."""
    yield _text(6, PARTITION_TOP + 21, "partition", weight="bold")
    for number, (key, state) in enumerate(MESSAGES):
        yield from _cell(_x(FIRST + number), PARTITION_TOP, key, state)


def _lanes() -> Iterator[str]:
    """Draw one lane for each key, with each message below the same message in the partition."""
    yield _text(LEFT, LANES_TOP - 16, "One handler at a time for each key; the keys run in parallel:")
    for row, key in enumerate(KEYS):
        top = LANES_TOP + row * LANE
        yield _text(6, top + 21, f"lane {key}", weight="bold")
        end = float(LEFT - GAP)
        for number, (owner, state) in enumerate(MESSAGES):
            if owner == key:
                x = _x(FIRST + number)
                yield _dots(end + GAP, x - GAP, top + HEIGHT / 2)
                yield from _cell(x, top, str(FIRST + number), state)
                end = x + CELL - GAP
        yield _dots(end + GAP, WIDTH - 8, top + HEIGHT / 2)


def _legend() -> Iterator[str]:
    for (state, meaning), x in zip(LEGEND.items(), (92, 204, 342, 500), strict=True):
        yield from _cell(x, LEGEND_TOP, "", state, width=18, height=16)
        yield _text(x + 25, LEGEND_TOP + 13, meaning)


def _cell(
    x: float, top: float, label: str, state: State, width: int = CELL - GAP, height: int = HEIGHT
) -> Iterator[str]:
    dashed = ' stroke-dasharray="4 3"' if state == "waiting" else ""
    edge = INK if state == "waiting" else FILLS[state]
    yield (
        f'<rect x="{x:g}" y="{top}" width="{width}" height="{height}" rx="5" fill="{FILLS[state]}" '
        f'stroke="{edge}" stroke-width="1.5"{dashed}/>'
    )
    if label:
        ink = INK if state == "waiting" else "#fff"
        yield _text(x + width / 2, top + height / 2 + 5, label, anchor="middle", fill=ink)


def _dots(start: float, end: float, y: float) -> str:
    return f'<path d="M{start:g} {y:g}H{max(start, end):g}" stroke="{INK}" stroke-dasharray="2 5"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", fill: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">{text}</text>'


def _x(offset: int) -> float:
    return LEFT + (offset - FIRST) * CELL


if __name__ == "__main__":
    PICTURE.write_text(draw())
