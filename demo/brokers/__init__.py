"""The brokers of the demo: JetStream and Kafka.

Reading order: ``broker``, ``backends``, ``jetstream``, ``cohort``, ``kafka``, ``coordinator``.
"""
