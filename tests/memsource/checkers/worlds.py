"""Legal histories, made once and used by many tests."""

from __future__ import annotations

from tests.memsource.checkers.made import Made
from tests.memsource.checkers.world import World

_made = Made(lambda directory, random: World(directory, random).run())
history_of = _made.history_of
segments_of = _made.segments_of
