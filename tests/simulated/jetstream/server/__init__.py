"""A nats-server as data: the text protocol of NATS, and the part of JetStream that ``lanes_jetstream`` uses.

The package imports no client library. A transport in a test passes bytes between a real client and a ``Session``.

Reading order: ``protocol``, ``stream``, ``bucket``, ``api``, ``server``.
"""
