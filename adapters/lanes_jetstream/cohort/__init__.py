"""A member of an exclusive cohort as a source.

Reading order: ``member``, ``setup``, ``stream``, ``partitioning``, ``source``, ``tenancy``, ``pulls``, ``backlog``,
``watch``, ``lease_store``, ``epoch_consumers``, ``epoch_names``, ``view``.
"""
