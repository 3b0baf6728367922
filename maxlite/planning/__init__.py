"""Memory, FLOPs and communication of a step, estimated or read from the compiled program."""
