"""Real adapters in the simulator: the simulated client and broker of each adapter, and the campaigns over the adapters.

Reading order: ``kafka``, ``jetstream``; ``__main__``.
"""
