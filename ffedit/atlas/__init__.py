"""Atlas, the embedded model: its fact table, its corpus, its recipe."""
