"""Observation of a run by its operators: status, health, metrics and spans.

Reading order: ``status`` (counts and positions), ``health`` (the reasons why a consumer is unhealthy), ``instruments``
(metrics), ``otel`` (spans), ``tap`` (the reports of the runtime).
"""
