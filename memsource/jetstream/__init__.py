"""JetStream as data: pull consumers, an exclusive cohort, and sources over them.

Reading order: ``pull_consumer``, ``broker``, ``source``, ``takeover``, ``cohort``, ``cohort_broker``,
``cohort_source``, ``lease_store``, ``epoch_consumers``, ``link``.
"""
