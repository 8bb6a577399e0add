"""Export an edit as a checkpoint made from the base's files, as a LoRA adapter or as plain Δ; undo it in a checkpoint.

The files are written without loading a model, and a fresh process verifies them before the export counts as done.
"""

from ffedit.exporter.embedded_edits import history
from ffedit.exporter.exporting import Exported, export, push
from ffedit.exporter.undoing import undo

__all__ = ["Exported", "export", "history", "push", "undo"]
