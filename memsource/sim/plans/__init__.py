"""The plans of runs, as values: they are drawn, shrunk, and printed as tokens.

Reading order: ``plan``, ``faults``, ``traffic``, ``strategies``, ``token``, ``shrink``.
"""
