"""maxlite: a small trainer for dense and mixture-of-experts language models in Flax Linen."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["load"]


def load(path: Any, *, dtype: Any = None, mesh: Any = None) -> tuple[Any, Any]:
  """Load (model, params) from a run folder or a Hugging Face folder, for notebooks.

  `model.apply(params, tokens_BT)` returns logits_BTV. See hf/load_model.py.
  """
  # JAX is not imported with the package, so that commands can report config errors fast.
  from maxlite.hf.load_model import load as load_weights

  return load_weights(path, dtype=dtype, mesh=mesh)
