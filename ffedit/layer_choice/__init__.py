"""The layer to edit: the published or usual one, or by tracing, or by trial edits at a few."""
