"""What may happen in a run, as values: drawn, shrunk, printed as a token.

Reading order: ``plan``, ``faults``, ``traffic``, ``strategies``, ``token``, ``shrink``.
"""
