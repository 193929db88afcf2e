"""``lanes_jetstream`` in the simulator: its real sources and the real nats client, over a simulated server.

Reading order: the room ``server``; ``seams``, ``network``, ``member``, ``broker``.
"""
