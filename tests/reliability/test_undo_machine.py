"""Undo is exact whatever comes before it; `evaluations/reliability/undo.py` runs this at a larger count."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from undoing import UndoMachine

TestUndo = UndoMachine.TestCase
TestUndo.settings = settings(
    max_examples=12,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
