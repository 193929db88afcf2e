"""Real adapters in the simulator: their own code, a simulated broker, and faults chosen between every two steps.

The room knows no client library. An adapter's side has a broker as data and a client with the surface that the adapter
uses; ``tests/simulated`` has the sides of ``lanes_kafka`` and ``lanes_jetstream``.

Reading order: ``choices``, ``pairs``, ``world``, ``runs``, ``campaign``; and ``threads``, for adapters with a thread.
"""
