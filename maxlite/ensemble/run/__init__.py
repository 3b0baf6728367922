"""The run of an ensemble: training in this process or in workers, searches, and the end."""
