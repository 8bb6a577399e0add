"""Choose the layer to edit: the published or usual one, by tracing, or by trial edits at a few layers."""
