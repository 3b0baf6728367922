"""The layers of a decoder. Axis letters: B sequences, T positions (or tokens), S key positions,
D model, F hidden, V vocabulary, H query heads, G key/value heads, C head channels, L key/value
latent, Q query latent, R rope channels, U value channels of a state, W taps of a convolution, P the
positions before them, E experts, K experts per token, A assignments (T * K),
M rows of a receive buffer, P shards of the expert axis, N layers; inside `shard_map` a lower-case
letter is this shard's part."""
