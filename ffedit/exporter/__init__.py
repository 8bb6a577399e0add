"""Export an edit as a checkpoint made from the base's files, as a LoRA adapter or as plain Δ; undo it in a checkpoint.

The files are written without loading a model, and a fresh process verifies them before the export counts as done.
"""

from ffedit.exporter.embedded_edits import history
from ffedit.exporter.exporting import Exported, export, ship
from ffedit.exporter.hub import push
from ffedit.exporter.undoing import restore_checkpoint, undo

__all__ = ["Exported", "export", "history", "push", "restore_checkpoint", "ship", "undo"]
