"""Compare methods of editing on one model and one set of facts, one by one, in batches and in sequences."""

from ffedit.benchmark.plan import Mode
from ffedit.benchmark.report import BenchReport
from ffedit.benchmark.run import bench

__all__ = ["BenchReport", "Mode", "bench"]
