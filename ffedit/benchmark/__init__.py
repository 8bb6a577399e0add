"""Compare editing methods on one model and one set of facts: single edits, batches and sequences."""

from ffedit.benchmark.plan import Mode
from ffedit.benchmark.report import BenchReport
from ffedit.benchmark.run import bench

__all__ = ["BenchReport", "Mode", "bench"]
