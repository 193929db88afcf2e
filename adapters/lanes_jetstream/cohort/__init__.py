"""Runs a member of an exclusive cohort as a source.

Reading order: ``settings``, ``partitioning``, ``setup``, ``source``, ``owned_partition``, ``pulls``, ``watch``,
``lease_store``, ``epoch_consumers``, ``view``.
"""
