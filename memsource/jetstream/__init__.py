"""JetStream as data: pull consumers, cohorts, and their sources.

The package has two cohorts. ``cohort`` decides all assignments in one object and is fast, so ``simulate`` uses
``cohort``. ``cohort_broker`` runs the shipped membership with all requests of its members, and takes about six times as
long.

Reading order: ``pull_consumer``, ``broker``, ``cohort``, ``takeover``, ``source``, ``queue``; ``link``,
``lease_store``, ``epoch_consumers``, ``cohort_broker``, ``cohort_source``; and the room ``server``.
"""
