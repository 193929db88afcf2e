"""The pure core, which makes every decision about messages and partitions.

The core has no async code, clock, randomness, logging or I/O. Time and random numbers are arguments.
``tests/core/test_purity.py`` checks the imports of every module.

Reading order: ``types``, ``lane``; ``ledgers``, ``outbox``; ``flow``, ``policy``, ``publishing``, ``effects``;
``chains``, ``commits``; ``ownership``, ``engine``, ``drain``; ``fair_queue``, ``partition_budgets``; ``snapshot``;
``ring``, ``ring_map``, ``queue_hash``; ``offset_map``; and the package ``cohort``. ``ring``, ``queue_hash`` and
``offset_map`` use only the module ``types`` of the core, and ``ring_map`` uses only ``ring``.
"""
