"""JetStream as data: pull consumers, cohorts, and sources over them.

It has two cohorts. ``cohort`` decides in one place and is fast: ``simulate`` uses it. ``cohort_broker`` runs the
membership that is shipped, with all its requests, and takes about six times as long.

Reading order: ``pull_consumer``, ``broker``, ``cohort``, ``takeover``, ``source``; ``link``, ``lease_store``,
``epoch_consumers``, ``cohort_broker``, ``cohort_source``.
"""
