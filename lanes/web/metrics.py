"""The metrics of the process in the format of Prometheus, through the exporter of OpenTelemetry."""

from __future__ import annotations

import logging
from typing import Final

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder

from lanes.observe.otel import is_idle

log = logging.getLogger("lanes.web")

_IMPORT: Final = "from opentelemetry.exporter.prometheus import PrometheusMetricReader; "


def missing_reader() -> str:
    """Return the reason why no reader for Prometheus has metrics, and the remedy."""
    if is_idle(metrics.get_meter_provider()):
        return (
            f"the program has set no MeterProvider; write {_IMPORT}"
            "metrics.set_meter_provider(MeterProvider(metric_readers=[PrometheusMetricReader()]))"
        )
    return (
        f"the MeterProvider of the program has no reader for Prometheus; write {_IMPORT}"
        "MeterProvider(metric_readers=[PrometheusMetricReader(), …])"
    )


class Metrics:
    """The metrics of the process. Any thread may call every method, and no method blocks.

    Args:
        name: Name of the consumer, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._found = False
        self._told = False

    def provide(self) -> None:
        """Set a global ``MeterProvider`` with a reader for Prometheus, unless the program has set a provider.

        Make this call before the consumer opens its source, because the consumer ignores a later provider. Idempotent.
        """
        if is_idle(metrics.get_meter_provider()):
            metrics.set_meter_provider(MeterProvider(metric_readers=[PrometheusMetricReader()]))
            # Before the first measurement the reader has no series.
            self._found = True

    def exposition(self, accept: str) -> tuple[bytes, str] | None:
        """Return the metrics in the format of Prometheus.

        Args:
            accept: The header ``Accept`` of the request.

        Returns:
            The text and its content type; None = no reader for Prometheus has metrics. The first such answer causes a
            warning in the log.
        """
        if not self._exist():
            if not self._told:
                self._told = True
                log.warning("%s: /metrics has no metrics, because %s", self._name, missing_reader())
            return None
        encode, content_type = choose_encoder(accept)
        return encode(REGISTRY), content_type

    def _exist(self) -> bool:
        # Only a reader of OpenTelemetry adds these series. A reader stays in the registry, so one look is enough.
        self._found = self._found or any(
            family.name.startswith(("target", "lanes", "messaging")) for family in REGISTRY.collect()
        )
        return self._found
