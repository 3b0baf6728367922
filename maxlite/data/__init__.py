"""Text to batches: files -> documents -> tokens on disk -> packed rows -> this host's batches."""
