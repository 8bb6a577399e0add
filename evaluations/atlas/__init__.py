"""Atlas: the fact table, the corpus, the recipe and the training of the embedded models."""
