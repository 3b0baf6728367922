"""maxlite: a small trainer for dense and mixture-of-experts language models in Flax Linen."""

__version__ = "0.1.0"
