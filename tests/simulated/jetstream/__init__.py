"""``lanes_jetstream`` in the simulator: its real sources and the real nats client, over a simulated server.

Reading order: ``seams``, ``network``, ``member``, ``broker``.
"""
