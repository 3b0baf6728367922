"""Packing of documents and conversations into rows."""
