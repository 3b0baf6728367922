"""What maxlite answers to the keys and values of MaxText."""
