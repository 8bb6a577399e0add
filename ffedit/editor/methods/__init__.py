"""The editing methods, one file each."""
