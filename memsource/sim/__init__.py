"""The simulator runs whole consumers with the user's handler on one loop in virtual time, under planned faults.

Reading order: the rooms ``plans``, ``loop``, ``world``, ``runs``; and ``errors``.
"""
