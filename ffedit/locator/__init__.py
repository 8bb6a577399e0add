"""Find where a fact is recalled: causal tracing (ROME, arXiv 2202.05262, section 2)."""

from ffedit.locator.corruption import Corruption, noise_scale
from ffedit.locator.result import CLEAR, Aggregate, Kind, Part, Trace, TraceSet, aggregate, site_of, span_of
from ffedit.locator.trace import locate, locate_all

__all__ = [
    "CLEAR",
    "Aggregate",
    "Corruption",
    "Kind",
    "Part",
    "Trace",
    "TraceSet",
    "aggregate",
    "locate",
    "locate_all",
    "noise_scale",
    "site_of",
    "span_of",
]
