"""Ship an edit: as a checkpoint made from the base's files, as a LoRA adapter, or as plain numbers; and undo it there.

What goes out is made without loading a model, and is compared in a fresh process before it counts as done.
"""

from ffedit.exporter.embedded_edits import history
from ffedit.exporter.exporting import Exported, export, ship
from ffedit.exporter.hub import push
from ffedit.exporter.undoing import restore_checkpoint, undo

__all__ = ["Exported", "export", "history", "push", "restore_checkpoint", "ship", "undo"]
