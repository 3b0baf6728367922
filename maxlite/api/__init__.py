"""The Python API of runs; its names are attributes of `maxlite`."""
