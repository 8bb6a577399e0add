"""Rendering of results for people: in a terminal, as figures and as HTML pages."""
