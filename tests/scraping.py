"""Scrapes of the service's metrics, read as Prometheus would."""

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

DEADLINE_S = 10.0
CLASSES = ("free", "reserved", "active", "cached", "warm", "quarantined")


@dataclass(frozen=True, slots=True)
class Page:
    """What a path of the HTTP port has answered."""

    status: int
    body: str


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in self.families.values():
            for sample in family.samples:
                self._samples[sample.name, frozenset(sample.labels.items())] = sample.value

    def __len__(self) -> int:
        return len(self._samples)

    def value(self, name: str, **labels: str) -> float:
        """Returns the sample of exactly these labels."""
        return self._samples[name, frozenset(labels.items())]

    def values(self, name: str, **labels: str) -> dict[frozenset[tuple[str, str]], float]:
        """Returns the samples that have these labels at least."""
        wanted = set(labels.items())
        return {found: value for (each, found), value in self._samples.items() if each == name and wanted <= found}

    def classes(self, **labels: str) -> Mapping[str, float]:
        """Returns the blocks of a pool by class."""
        return {name: self.value("kvharbor_pool_blocks", **{**labels, "class": name}) for name in CLASSES}


def get(address: str, path: str) -> Page:
    """Gets a page of the HTTP port at HOST:PORT."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE_S) as response:
            return Page(response.status, response.read().decode())
    except urllib.error.HTTPError as refused:
        with refused:
            return Page(refused.code, refused.read().decode())


def scrape(address: str) -> Scrape:
    """Scrapes the metrics at HOST:PORT."""
    page = get(address, "/metrics")
    assert page.status == 200, page.body
    return Scrape(page.body)
