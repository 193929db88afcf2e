"""Dead letters on the wire, and the operator's access to them.

Reading order: ``wire``, ``box``.
"""
