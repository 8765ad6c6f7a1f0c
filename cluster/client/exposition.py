"""Prometheus' text format as a dictionary."""

from __future__ import annotations

from cluster.client.errors import ProtocolError


def parse_metrics(text: str) -> dict[str, float]:
    """``{'moonpool_gateway_cached_tokens_total{tier="dram"}': 512.0, ...}``; labels in alphabetical order.

    Raises :class:`ProtocolError` on text in another format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                values[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    except (ValueError, IndexError, KeyError) as error:
        raise ProtocolError("the metrics are not in Prometheus' text format") from error
    return values
