"""Memory, FLOPs and communication of a training step, estimated or from its compiled program."""
