"""The decisions of a cohort: the plan, the records of its bucket, and the lease machine of one partition.

Reading order: ``plan``, ``records``, ``ledger``, ``checkpoint_pace``, ``actions``, ``phases``, ``held_lease``,
``lease_machine``.
"""
