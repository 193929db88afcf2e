"""The plans of runs: their draw, their shrinking, and their tokens.

Reading order: ``plan``, ``faults``, ``traffic``, ``strategies``, ``token``, ``shrink``.
"""
