"""The simulator: whole consumers around the user's handler, on one loop in virtual time, under planned faults.

Reading order: the rooms ``plans``, ``loop``, ``world``, ``runs``; and ``errors``.
"""
