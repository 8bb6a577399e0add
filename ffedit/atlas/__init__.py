"""Atlas, the embedded models: their fact table, their corpus, their recipe."""
