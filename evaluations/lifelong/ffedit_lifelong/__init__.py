"""Published post-processing of the changes that a long sequence of edits makes, on top of AlphaEdit, one file each."""
