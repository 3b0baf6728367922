"""The layers of a decoder.

The name of an array ends in its axes, as `x_BTD`. Inside `jax.shard_map` a lower-case letter is
this shard's part of an axis; 1 is an axis of size one. A letter that means something else is
explained where it is used.

  A  assignments of tokens to experts (T * K)     M  rows of a receive buffer
  B  sequences                                    N  layers
  C  channels of a head                           P  shards of the expert axis
  D  channels of the residual stream              Q  channels of the query latent
  E  experts                                      R  rotated channels
  F  hidden channels of an MLP                    S  positions of keys
  G  key/value heads                              T  positions, or tokens of all sequences
  H  query heads                                  U  value channels of a recurrent state
  J  draft heads, layers that predict ahead       V  vocabulary
  K  experts per token                            W  taps of a convolution
  L  channels of the key/value latent             Z  members of an ensemble
"""
