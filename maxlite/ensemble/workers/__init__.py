"""Worker processes on this machine or on a Ray cluster."""
