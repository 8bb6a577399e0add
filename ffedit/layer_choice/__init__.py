"""Choose the layer to edit: by calibration edits, by tracing, or from a published table."""
