"""Files on this machine and on object stores, and the files that a run owns."""
