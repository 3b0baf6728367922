"""What a run keeps of the Hugging Face folder that its model was imported from, for an export."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from maxlite.checkpoint.chunked_array import whole
from maxlite.checkpoint.parameters import StoredParameters
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config
from maxlite.config.schema import LoraConfig, ModelConfig
from maxlite.errors import UserError
from maxlite.hf.family import HfFamily
from maxlite.hf.hf_checkpoint import open_weights
from maxlite.hf.hf_folder import CONFIG, COPY_AGAIN, DTYPES, read_config, write_json
from maxlite.hf.load_model import abstract_params
from maxlite.hf.tensor_mapping import tensor_mappings
from maxlite.storage.file_io import read_json_object
from maxlite.storage.json_values import JsonObject
from maxlite.storage.object_store import local_tokenizer

RESTORE = "restore it from a copy"


@dataclasses.dataclass(frozen=True)
class ImportSource:
  """What is known of the folder; nothing if a run was not imported."""

  config: JsonObject | None = None  # a config.json, perhaps of another model
  # {path: type of its tensors} of the parameters that have another type than `weight_dtype`.
  types: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def with_types(
    self, params: Mapping[str, jax.ShapeDtypeStruct], stored: StoredParameters
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Return `params` with the types of the imported tensors that hold their values exactly.

    A router's bias has 32 bits in every run. It is exported with 16 if the imported one had as
    many and was not trained.
    """
    typed = dict(params)
    for path, name in self.types.items():
      if path in params:
        values = stored.read(path, whole(params[path].shape))
        if (values.astype(name) == values).all():
          typed[path] = params[path].update(dtype=np.dtype(name))
    return typed


def write_source(run: RunFolder, directory: Path, family: HfFamily, model: ModelConfig) -> None:
  """Keep what an export of the run needs of the folder `directory`, the source of `model`."""
  tensors = open_weights(directory)
  params = abstract_params(dataclasses.replace(model, lora=LoraConfig()))
  types = {}
  for mapping in tensor_mappings(family, model, params):
    for path in mapping.paths:
      if params[path].dtype.name != model.weight_dtype:
        types[path] = DTYPES[tensors[mapping.tensor].dtype].name
  write_json(run.source, {"config": read_config(directory), "types": types})


def read_source(run: RunFolder, cfg: Config) -> ImportSource:
  """Return what the run of `cfg` has of the folder that its model was imported from.

  A run that starts from the weights of another has the config.json next to its tokenizer.
  """
  if run.source.is_file():
    values = read_json_object(run.source, RESTORE)
    config = values.get("config")
    types = values.get("types")
    names = {dtype.name for dtype in DTYPES.values()}
    if not isinstance(config, dict) or not isinstance(types, dict) or set(types.values()) - names:
      raise UserError(f"{run.source} does not describe an import: {RESTORE}")
    return ImportSource(config, types)
  if cfg.checkpoint.load_parameters_path and cfg.data.tokenizer_path:
    file = local_tokenizer(cfg.data.tokenizer_path).parent / CONFIG
    if file.is_file():
      return ImportSource(read_json_object(file, COPY_AGAIN))
  return ImportSource()
