"""Tests of the decisions of a cohort: plan, records and lease machine, with no broker."""
