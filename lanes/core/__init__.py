"""The pure core: it decides, and does nothing else.

No async, clock, randomness, logging or I/O lives below this package; time and chance are arguments.
``tests/core/test_purity.py`` parses the imports of every module here to prove it.

Reading order: ``types``, ``lane``; ``ledgers``, ``outbox``; ``flow``, ``policy``, ``effects``; ``chains``, ``commits``;
``ownership``, ``engine``, ``drain``; ``snapshot``; ``ring``, ``offset_map``, which stand alone; and the room
``cohort``.
"""
