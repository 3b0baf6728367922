"""A local server for the official `tinker` client: `python -m maxlite.tinker`."""
