"""Draws lease.svg: a cohort partition moves to another owner in a clean move, and after a freeze.

Run the program after you change it: python docs/pictures/lease_picture.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

__all__ = ["PICTURE", "draw"]

PICTURE: Final = Path(__file__).with_name("lease.svg")

Kind = Literal["owns", "step", "frozen", "waits", "fenced"]


class Span(NamedTuple):
    """One bar in the row of a member; ``start`` and ``end`` are in arbitrary units."""

    start: int
    end: int
    kind: Kind
    label: str


class Scene(NamedTuple):
    title: str
    members: dict[str, list[Span]]
    renewals: list[int]  # of member A
    marks: dict[str, int]


SCENES: Final = (
    Scene(
        "A move: the plan gives the partition to B",
        {
            "A": [
                Span(0, 25, "owns", "owns, epoch 7"),
                Span(25, 40, "step", "drains"),
                Span(40, 56, "step", "writes ledger"),
                Span(56, 67, "step", "releases"),
            ],
            "B": [
                Span(25, 67, "waits", "looks every 0.25 s"),
                Span(67, 80, "step", "epoch 8"),
                Span(80, 100, "owns", "owns"),
            ],
        },
        [0, 8, 16, 24, 32, 40, 48],
        {"new plan": 25, "lease is free": 67},
    ),
    Scene(
        "A freeze: A stops renewing and wakes too late",
        {
            "A": [
                Span(0, 25, "owns", "owns, epoch 7"),
                Span(25, 72, "frozen", "frozen"),
                Span(72, 100, "fenced", "starts and sends nothing"),
            ],
            "B": [
                Span(25, 58, "waits", "looks every 0.25 s"),
                Span(58, 80, "step", "epoch 8"),
                Span(80, 100, "owns", "owns"),
            ],
        },
        [0, 8, 16, 24],
        {"deadline of A": 52, "lease expires": 58},
    ),
)

# Middle tones: each has a contrast of at least 3 with a white page and with a dark one.
INK: Final = "#767676"
RED: Final = "#c4512d"
FILLS: Final[dict[Kind, str]] = {
    "owns": "#3b8050",
    "step": "#3c76c0",
    "frozen": "none",
    "waits": "none",
    "fenced": RED,
}

LEFT, UNIT, HEIGHT, LINE, SCENE = 90, 6.3, 30, 42, 156
WIDTH, BOTTOM = LEFT + 100 * UNIT + 10, len(SCENES) * SCENE


def draw() -> str:
    """Return the picture as the text of an SVG file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {BOTTOM}" role="img" '
        'aria-labelledby="title what" font-family="system-ui, sans-serif" font-size="13">'
    )
    what = (
        "In a move, A drains, writes its ledger and releases the lease; only then does B acquire it. After a freeze, "
        "the deadline of A passes before the lease expires. B acquires the lease then, and A starts nothing later."
    )
    names = ['<title id="title">A lease changes its owner</title>', f'<desc id="what">{what}</desc>']
    scenes = [line for number, scene in enumerate(SCENES) for line in _scene(scene, number * SCENE)]
    return "\n".join([head, *names, *scenes, "</svg>\n"])


def _scene(scene: Scene, top: int) -> Iterator[str]:
    yield _text(6, top + 18, scene.title, weight="bold")
    first = top + 52
    for name, at in scene.marks.items():
        yield f'<path d="M{_x(at):g} {first - 10}V{first + LINE + HEIGHT + 8}" stroke="{RED}" stroke-width="2"/>'
        last = at == max(scene.marks.values())
        yield _text(_x(at) + (4 if last else -4), first - 14, name, anchor="start" if last else "end", fill=RED)
    for row, (member, spans) in enumerate(scene.members.items()):
        y = first + row * LINE
        yield _text(6, y + 20, f"member {member}", weight="bold")
        for span in spans:
            yield from _span(span, y)
    yield _text(_x(0), first - 14, "renewals of A")
    for at in scene.renewals:
        yield f'<path d="M{_x(at):g} {first - 8}v6" stroke="{INK}" stroke-width="2"/>'


def _span(span: Span, y: int) -> Iterator[str]:
    filled = FILLS[span.kind] != "none"
    dashed = "" if filled else ' stroke-dasharray="4 3"'
    edge = FILLS[span.kind] if filled else INK
    yield (
        f'<rect x="{_x(span.start) + 2:g}" y="{y}" width="{(span.end - span.start) * UNIT - 4:g}" height="{HEIGHT}" '
        f'rx="5" fill="{FILLS[span.kind]}" stroke="{edge}" stroke-width="1.5"{dashed}/>'
    )
    if filled:
        yield _text(_x((span.start + span.end) / 2), y + 20, span.label, anchor="middle", fill="#fff")
    else:
        yield _text(_x(span.start) + 12, y + 20, span.label)  # clear of the marks


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", fill: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">{text}</text>'


def _x(time: float) -> float:
    return LEFT + time * UNIT


if __name__ == "__main__":
    PICTURE.write_text(draw())
