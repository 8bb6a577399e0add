"""Export an edit as a checkpoint, a LoRA adapter or a GGUF file; undo it in a checkpoint.

The files are written without loading a model, and a fresh process verifies them before the export counts as done.
"""

from ffedit.exporter.embedded_edits import history
from ffedit.exporter.exporting import FORMATS, Exported, export, packed_edit, undo

__all__ = ["FORMATS", "Exported", "export", "history", "packed_edit", "undo"]
