"""The simulator: whole consumers, the user's handler in them, on one loop in virtual time, under a plan of faults.

Reading order: ``errors``.
"""
