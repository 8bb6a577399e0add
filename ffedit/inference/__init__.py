"""Running a model: replay from a layer, generation, text, batches that fit into memory."""
