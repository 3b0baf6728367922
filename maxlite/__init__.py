"""maxlite: a small trainer for dense and mixture-of-experts language models in Flax Linen."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["load"]


def load(path: Any, *, dtype: Any = None, mesh: Any = None) -> tuple[Any, Any]:
  """(model, params) of a run folder or of a folder in Hugging Face's format; for notebooks.

  `model.apply(params, tokens_BT)` gives logits_BTV; hf/load_model.py tells the rest.
  """
  # JAX is loaded only for who needs it: the commands import this package to read their config.
  from maxlite.hf.load_model import load as load_weights

  return load_weights(path, dtype=dtype, mesh=mesh)
