"""The exclusive cohort, decided in pure code: the plan, the records, and the machine of one partition's ownership.

Reading order: ``plan``, ``records``, ``ledger``, ``actions``, ``phases``, ``held_lease``, ``lease_machine``.
"""
