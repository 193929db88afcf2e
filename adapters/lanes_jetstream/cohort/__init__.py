"""Runs a member of an exclusive cohort as a source.

Reading order: ``settings``, ``partitioning``, ``setup``, ``source``, ``tenancy``, ``pulls``, ``watch``,
``lease_store``, ``epoch_consumers``, ``view``.
"""
