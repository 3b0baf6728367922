"""The run of an ensemble: its members' run folders, training, and the end."""
