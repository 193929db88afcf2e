"""The contract suites: what every source, store and dead-letter topic promises, as functions a backend's tests run.

This package gives the suite for sources. The other suites are modules: ``dead_letters``, ``attempts``, ``leases``,
``epochs`` and, for sources that commit positions, ``commits``.

Reading order: ``harness``, ``source``, ``room``, ``commits``, ``dead_letter_harness``, ``dead_letters``,
``attempts``, ``leases``, ``epochs``.
"""

from memsource.contract.source import NOT_CHECKED, Ability, Check, ContractBroken, Harness, Sample, checks

__all__ = ["NOT_CHECKED", "Ability", "Check", "ContractBroken", "Harness", "Sample", "checks"]
