"""A member of an exclusive cohort at work, on any server that can keep leases.

Reading order: ``leases`` (the contract of a store), ``membership`` (a member), ``roster`` (heartbeat and plan),
``keeper`` (the lease of one partition), ``owned`` (the partitions that a source sees).
"""
