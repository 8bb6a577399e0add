"""Figures as files, drawn with matplotlib."""
