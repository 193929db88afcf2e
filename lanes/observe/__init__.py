"""Observation of a run by its operators: status, health, metrics and spans.

Reading order: ``status`` (counts and positions), ``health`` (reasons why a consumer does not get on), ``instruments``
(metrics), ``otel`` (spans), ``tap`` (the runtime's one place to report an event).
"""
