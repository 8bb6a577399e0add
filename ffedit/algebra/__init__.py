"""Pure mathematics on torch tensors: the updates of the methods, low-rank matrices, moments of keys, intervals."""
