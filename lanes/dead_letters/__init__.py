"""Dead letters on the wire, and the operator's access to them.

Reading order: ``wire`` (headers that every backend writes), ``box`` (the box that ``lanes dead-letters`` opens).
"""
