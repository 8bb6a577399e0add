"""The layer to edit: the published or usual one, or by tracing, by a sweep, by trial edits at a few."""
