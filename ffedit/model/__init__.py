"""A transformers model seen as key-value memories."""
