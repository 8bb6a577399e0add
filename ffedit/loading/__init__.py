"""Load a model by name, find its parts and verify them."""
