"""One pass over a text that sees every memory."""
