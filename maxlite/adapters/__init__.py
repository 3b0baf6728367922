"""Many adapters on one frozen base: losses of rows, and an engine with a slot per adapter."""
