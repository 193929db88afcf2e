"""JetStream as data: pull consumers, cohorts, and their sources.

The package has two cohorts:

- ``cohort`` decides all assignments in one object. Its members remember no finished message, so the consumer itself
  must recognise a redelivered message. ``simulate`` uses ``cohort``.
- ``cohort_broker`` runs the shipped membership with all requests of its members. Its members filter finished messages,
  so they hide such a redelivery from the consumer. A run takes about five times as long.

Reading order: ``pull_consumer``, ``broker``, ``cohort``, ``takeover``, ``source``, ``queue``; ``link``,
``lease_store``, ``epoch_consumers``, ``cohort_broker``, ``cohort_source``.
"""
