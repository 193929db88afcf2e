"""Real adapters in the simulator: the simulated side of each adapter, and the campaigns over them.

Reading order: ``kafka``, ``jetstream``; ``__main__``.
"""
