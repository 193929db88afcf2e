"""What the demo needs of a broker, on JetStream and on Kafka.

Reading order: ``broker``, ``backends``, ``jetstream``, ``cohort``, ``kafka``, ``coordinator``.
"""
