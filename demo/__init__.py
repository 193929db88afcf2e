"""The demo: an event log, a real server, a crash during the run, and a report on every promise.

A parent process owns all parts that must survive a crash: the ledger, the approval service, the streams. Worker
processes run the handler under ``lanes``, and the parent kills a worker with -9 on purpose.

Reading order: ``run``, ``config``, ``under_lanes``, ``events``, ``ledger``, ``faults``, ``report``, ``history``,
``membership``, ``lateness``, ``progress``, ``places``, ``child``, ``supervise``, ``view``, ``terminal``, ``options``,
``errors``; and the rooms ``workers``, ``brokers``, ``group``, ``spark``.
"""

from __future__ import annotations

from demo.config import DemoConfig
from demo.errors import DemoError
from demo.faults import Faults
from demo.progress import Progress
from demo.report import Report
from demo.run import run

__all__ = ["DemoConfig", "DemoError", "Faults", "Progress", "Report", "run"]
