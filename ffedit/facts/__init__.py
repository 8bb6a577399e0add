"""Facts: what a model should come to say, the file formats of the field, and their readers."""
