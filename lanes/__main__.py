"""``python -m lanes`` runs the same command line as the console script ``lanes``."""

from __future__ import annotations

from lanes.cli.app import main

if __name__ == "__main__":
    main()
