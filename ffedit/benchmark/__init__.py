"""Compare editing methods on one model and one set of facts: single edits, batches and sequences."""

from ffedit.benchmark.report import BenchReport
from ffedit.benchmark.run import bench
from ffedit.benchmark.settings import Mode

__all__ = ["BenchReport", "Mode", "bench"]
