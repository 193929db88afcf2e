"""The mutation score of each file: ``make mutants``, with the mutants of the mutmut package.

Reading order: ``targets``, ``mutations``, ``planting``, ``probes``, ``forks``, ``servers``, ``runner``, ``verdicts``,
``equivalents``, ``totals``.

mutmut generates the mutants, and this room runs them. mutmut's own runner mutates no method of a decorated class, such
as a dataclass, and no property. Here, a forked child replaces the code of one function, so every function counts.
Code outside of functions, default values and texts for people are not mutated.
"""
