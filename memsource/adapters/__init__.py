"""Real adapters in the simulator: their own code, a simulated broker, and faults chosen between every two steps.

The room knows no client library. Each adapter supplies a simulated broker, and a client with the methods that the
adapter calls. ``tests/simulated`` has the simulated brokers and clients for Kafka, JetStream and PostgreSQL.

Reading order: ``choices``, ``pairs``, ``world``, ``runs``, ``campaign``; and ``threads``, for adapters with a thread.
"""
