"""A run: state, loss, step, wiring (`setup`) and the loop."""
