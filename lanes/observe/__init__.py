"""What a run tells its operators: status, health, metrics and spans.

Reading order: ``status``, ``health``, ``stalls``, ``unsettled``, ``given_up``, ``instruments``, ``otel``, ``tap``.
"""
