"""The pure core, which makes every decision and performs none.

The core has no async code, clock, randomness, logging or I/O. Time and random numbers are arguments.
``tests/core/test_purity.py`` checks the imports of every module.

Reading order: ``types``, ``lane``; ``ledgers``, ``outbox``; ``flow``, ``policy``, ``publishing``, ``effects``;
``chains``, ``commits``; ``ownership``, ``engine``, ``drain``; ``fair_queue``, ``partition_budgets``; ``snapshot``;
``ring``, ``ring_map``, ``queue_hash``; ``offset_map``; and the package ``cohort``. ``ring``, ``queue_hash`` and
``offset_map`` use no other module of the core but ``types``, and ``ring_map`` uses only ``ring``.
"""
