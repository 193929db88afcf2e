"""What the status says that a process ends with: one meaning a number, for consumers and commands alike."""

from __future__ import annotations

from typing import Final

__all__ = [
    "EXIT_AT_ONCE",
    "EXIT_DRAINED",
    "EXIT_FAILED",
    "EXIT_HALTED",
    "EXIT_INTERRUPTED",
    "EXIT_UNUSABLE",
    "EXIT_USAGE",
]

EXIT_DRAINED: Final = 0
"""Stopped in order: by a first signal, or because the source had an end."""
EXIT_FAILED: Final = 1
"""A setting that cannot be kept, or a broker that is gone."""
EXIT_UNUSABLE: Final = 3
"""Of a command: bad input, or something that is needed and missing."""
EXIT_AT_ONCE: Final = 4
"""Stopped at once, by a second signal; what had not finished is delivered again."""
EXIT_HALTED: Final = 5
"""A message was given up under the poison policy ``exit``; everything else was drained."""
EXIT_USAGE: Final = 64
"""A command or an option that does not exist."""
EXIT_INTERRUPTED: Final = 130
"""Ended by Ctrl-C."""
