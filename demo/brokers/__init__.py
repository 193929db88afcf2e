"""The brokers of the demo: JetStream, Kafka and PostgreSQL.

Reading order: ``broker``, ``backends``, ``jetstream``, ``cohort``, ``kafka``, ``coordinator``, ``postgres``,
``ranges``.
"""
