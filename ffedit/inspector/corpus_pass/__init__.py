"""One pass over a text that records every memory."""
