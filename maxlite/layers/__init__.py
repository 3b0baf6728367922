"""The parts of a decoder. Axis letters: B sequences, T positions, D model, F hidden, V vocabulary,
H query heads, G key/value heads, C head channels, E experts, K experts per token, N layers."""
