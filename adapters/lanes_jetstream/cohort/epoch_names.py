"""What the durables of a cohort are called: one name for each partition, epoch and sub-number, and no two for one."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from lanes.core.cohort.records import HIGHEST

__all__ = ["EpochName", "mark_of"]

_NAME: Final = re.compile(r"-p(\d{1,5})-e(\d{1,19})(?:-(\d{1,9}))?")


def mark_of(namespace: str) -> str:
    """What the durable is called that says that a work queue has a cohort: none of a partition."""
    return f"{namespace}-cohort"


class EpochName(NamedTuple):
    """A durable's cohort partition, its epoch, and its number among those of one epoch: 0, then takeovers from
    oneself."""

    partition: int
    epoch: int
    sub: int

    def durable(self, namespace: str) -> str:
        """``<namespace>-p<partition>-e<epoch>``, with ``-<sub>`` behind that unless it is 0."""
        return f"{namespace}-p{self.partition}-e{self.epoch}" + (f"-{self.sub}" if self.sub else "")

    @classmethod
    def parse(cls, namespace: str, durable: object) -> EpochName | None:
        """The inverse of ``durable``; None for what it does not make, which is nobody's of this cohort."""
        if not isinstance(durable, str) or not durable.startswith(namespace):
            return None
        match = _NAME.fullmatch(durable, len(namespace))
        if match is None:
            return None
        parsed = cls(int(match[1]), int(match[2]), int(match[3] or 0))
        # A leading zero makes another name, and no record holds a higher epoch.
        return parsed if parsed.epoch <= HIGHEST and parsed.durable(namespace) == durable else None
