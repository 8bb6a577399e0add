"""Files on disk: written whole or not at all, locked, cached, patched in place."""
