"""The contract suites: the promises of sources, stores and dead letters, as check functions for a backend's tests.

This package exports the suite of sources. The modules ``dead_letters``, ``publishers``, ``attempts``, ``states``,
``locks``, ``leases`` and ``epochs`` have the other suites. The module ``commits`` has the checks of sources that commit
positions.

Reading order: ``harness``, ``source``, ``commits``, ``dead_letter_harness``, ``dead_letters``,
``publishers``, ``attempts``, ``states``, ``locks``, ``leases``, ``epochs``.
"""

from memsource.contract.source import NOT_CHECKED, Ability, Check, ContractBroken, Harness, Sample, checks

__all__ = ["NOT_CHECKED", "Ability", "Check", "ContractBroken", "Harness", "Sample", "checks"]
