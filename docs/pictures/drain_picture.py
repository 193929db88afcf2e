"""Draws drain.svg: the phases of a drain, their limits, and the span in which a result counts.

Run the program after you change it: python docs/pictures/drain_picture.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["PICTURE", "draw"]

PICTURE: Final = Path(__file__).with_name("drain.svg")


class Phase(NamedTuple):
    name: str
    limit: str
    width: int


PHASES: Final = (
    Phase("ending", "drain_timeout", 150),
    Phase("cancelling", "grace", 110),
    Phase("settling, keeping", "5 s, or the rest", 150),
    Phase("releasing", "10 s, or the lease", 150),
)
FENCED_AFTER: Final = 2
"""Phases before the fence."""

SPANS: Final = {"handlers run": 2, "results count": 2, "messages are settled": 3, "the source owns it": 4}
"""Each activity, and the number of phases it lasts."""

# Middle tones: each has a contrast of at least 3 with a white page and with a dark one.
INK: Final = "#767676"
BLUE: Final = "#3c76c0"
GREEN: Final = "#3b8050"
RED: Final = "#c4512d"

LEFT, TOP, HEIGHT, ROW = 150, 56, 46, 30
EDGES: Final = tuple(accumulate((phase.width for phase in PHASES), initial=LEFT))
ROWS_TOP: Final = TOP + HEIGHT + 22
SUM_TOP: Final = ROWS_TOP + len(SPANS) * ROW + 8
WIDTH, BOTTOM = EDGES[-1] + 10, SUM_TOP + 34


def draw() -> str:
    """Return the picture as the text of an SVG file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BOTTOM}" role="img" '
        'aria-labelledby="title what" font-family="system-ui, sans-serif" font-size="13">'
    )
    steps = ", then ".join(f"{phase.name} (at most {phase.limit})" for phase in PHASES)
    what = f"A drain runs through {steps}. The fence is before settling: later results do not count."
    names = ['<title id="title">The stages of a drain</title>', f'<desc id="what">{what}</desc>']
    return "\n".join([head, *names, *_phases(), *_spans(), *_fence(), *_sum(), "</svg>\n"])


def _phases() -> Iterator[str]:
    yield _text(6, TOP + 20, "phase", weight="bold")
    yield _text(6, TOP + 38, "at most")
    for phase, (start, end) in zip(PHASES, pairwise(EDGES), strict=True):
        yield (
            f'<rect x="{start + 2}" y="{TOP}" width="{end - start - 4}" height="{HEIGHT}" rx="5" fill="none" '
            f'stroke="{INK}" stroke-width="1.5"/>'
        )
        yield _text((start + end) / 2, TOP + 20, phase.name, anchor="middle", weight="bold")
        yield _text((start + end) / 2, TOP + 38, phase.limit, anchor="middle")
    yield _text(LEFT, 18, "revoke or stop")
    yield _text(EDGES[-1], 18, "handed over", anchor="end")
    # Handlers that end in time lead past the cancellation.
    start, end = EDGES[1] - 30, EDGES[FENCED_AFTER] + 30
    yield (
        f'<path d="M{start} {TOP - 2}C{start + 20} {TOP - 28} {end - 20} {TOP - 28} {end} {TOP - 4}" fill="none" '
        f'stroke="{GREEN}" stroke-width="1.5"/>'
    )
    yield f'<path d="M{end - 8} {TOP - 7}L{end} {TOP - 2}L{end - 2} {TOP - 12}" fill="none" stroke="{GREEN}"/>'
    yield _text((start + end) / 2, TOP - 26, "every handler has ended", anchor="middle", fill=GREEN)


def _spans() -> Iterator[str]:
    for row, (name, phases) in enumerate(SPANS.items()):
        top = ROWS_TOP + row * ROW
        fill = GREEN if name == "results count" else BLUE
        yield _text(6, top + 13, name)
        yield (f'<rect x="{LEFT + 2}" y="{top}" width="{EDGES[phases] - LEFT - 4}" height="16" rx="4" fill="{fill}"/>')
    end = EDGES[SPANS["handlers run"]]
    yield f'<path d="M{end + 4} {ROWS_TOP + 8}H{EDGES[-1] - 2}" stroke="{INK}" stroke-dasharray="3 4"/>'
    yield _text(EDGES[-1], ROWS_TOP + 4, "a zombie is reported", anchor="end")


def _fence() -> Iterator[str]:
    at = EDGES[FENCED_AFTER]
    yield f'<path d="M{at} {TOP - 2}V{SUM_TOP - 8}" stroke="{RED}" stroke-width="2.5"/>'
    yield _text(at + 7, ROWS_TOP + ROW + 13, "fence", weight="bold", fill=RED)


def _sum() -> Iterator[str]:
    end = EDGES[-1]
    yield f'<path d="M{LEFT} {SUM_TOP}v8H{end}v-8" fill="none" stroke="{INK}" stroke-width="1.5"/>'
    yield _text((LEFT + end) / 2, SUM_TOP + 25, "Settings.longest_drain", anchor="middle")


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", fill: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw())
