"""The outputs of handlers, and the contract of a publisher, which sends the outputs.

Reading order: ``publisher``.
"""

from lanes.outputs.publisher import Headers, Output, Publisher, Report, output_id

__all__ = ["Headers", "Output", "Publisher", "Report", "output_id"]
