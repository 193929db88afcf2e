"""``lanes_postgres`` in the simulator: the real adapter over simulated connections to a server as data.

Reading order: ``statements``, ``client``, ``seams``, ``member``, ``broker``, ``ranged``, ``adapter``, ``scripts``.
"""
