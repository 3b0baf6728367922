"""Folders with quantized weights, compared with folders of the numbers that they stand for."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from hf_measure import as_numpy
from safetensors.numpy import save_file

from maxlite.config.schema import DEFAULTS, ModelConfig, build
from maxlite.hf.hf_checkpoint import params_from_hf
from maxlite.hf.hf_config import model_keys
from maxlite.hf.load_model import HfWeights, abstract_params


def assert_read_as(folder: Path, numbers: dict[str, np.ndarray]) -> None:
  """Assert that `folder` has the parameters of `numbers` in bfloat16, by name of the tensor.

  A folder of `numbers` is written beside it.
  """
  assert HfWeights(folder).model.dtype == "bfloat16"
  config = json.loads((folder / "config.json").read_text())
  del config["quantization_config"]
  plain = folder.with_name("plain")
  plain.mkdir()
  (plain / "config.json").write_text(json.dumps(config))
  narrow = {name: array.astype(ml_dtypes.bfloat16) for name, array in numbers.items()}
  save_file(narrow, plain / "model.safetensors")
  got = parameters_of(folder)
  want = parameters_of(plain)
  assert got.keys() == want.keys()
  for path, array in want.items():
    np.testing.assert_array_equal(got[path], array)


def add_to_config(folder: Path, **keys: Any) -> None:
  """Add keys to config.json."""
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def parameters_of(folder: Path) -> dict[str, np.ndarray]:
  """Return {path: array} of a folder."""
  family, keys = model_keys(folder)
  model = build(ModelConfig, DEFAULTS | keys)
  params = params_from_hf(folder, family, model, model.vocab_size, abstract_params(model))
  return {path: as_numpy(chunked) for path, chunked in params.items()}
