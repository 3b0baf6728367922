"""Data sources: readers of files, and the SOURCES table."""
