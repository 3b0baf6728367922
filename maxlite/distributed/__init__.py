"""Many processes as one run: start-up, failure detection, signals."""
