"""Training on what the model writes: prompts, completions, their verification and rewards."""
