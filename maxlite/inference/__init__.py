"""Text from a trained decoder: prompts in, tokens out, many rows at once."""
