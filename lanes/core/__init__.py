"""The pure core: it decides, and does nothing else.

No async, clock, randomness, logging or I/O lives below this package; time and chance are arguments.
``tests/core/test_purity.py`` parses the imports of every module here to prove it.

Read in this order: ``types``, ``lane``, ``ledger``, ``outbox``, ``flow``, ``retry``, ``effects``, ``engine``.
"""
