"""Reading /metrics, and the log of requests, in tests."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """One answer of /metrics, parsed."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """A sample's value."""
        return self._samples[name, frozenset(labels.items())]

    def by_label(self, name: str) -> dict[str, float]:
        """The values of a metric that has one label, by its value."""
        found = {labels: value for (key, labels), value in self._samples.items() if key == name}
        return {next(iter(labels))[1]: value for labels, value in found.items()}

    @property
    def growing(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """All that may only grow: counters, and histograms with their buckets and sums."""
        kinds = ("counter", "histogram")
        families = [family for family in self.families.values() if family.type in kinds]
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if not sample.name.endswith("_created")
        }


async def scrape(app: FastAPI) -> Scrape:
    """What the app says of itself now."""
    body, _ = await app.state.metrics.scrape("")
    return Scrape(body.decode())


@contextmanager
def request_records() -> Iterator[list[dict[str, Any]]]:
    """The end-of-request records logged while the block runs."""
    records: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(json.loads(record.getMessage()))

    logger, handler = logging.getLogger("octavo.requests"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
