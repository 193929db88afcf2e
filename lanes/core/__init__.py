"""The pure core: it makes every decision and performs none.

It has no async code, clock, randomness, logging or I/O: time and chance are arguments. ``tests/core/test_purity.py``
proves that from the imports of every module.

Reading order: ``types``, ``lane``; ``ledgers``, ``outbox``; ``flow``, ``policy``, ``effects``; ``chains``, ``commits``;
``ownership``, ``engine``, ``drain``; ``snapshot``; ``ring``, ``offset_map``, which stand alone; and the room
``cohort``.
"""
