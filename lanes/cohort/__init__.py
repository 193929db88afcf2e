"""A member of an exclusive cohort at work, on any server that can keep leases.

Reading order: ``leases``, ``membership``, ``roster``, ``keeper``, ``owned``.
"""
