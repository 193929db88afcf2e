"""The simulated side of ``lanes_kafka``: the calls of ``confluent_kafka`` that it makes, over a broker as data.

Reading order: ``link``, ``broker``, ``events``, ``consumer``, ``producer``, ``admin``, ``adapter``.
"""
