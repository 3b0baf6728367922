"""config.json: find the model's family and convert between its keys and ours."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from maxlite.config.load import validate
from maxlite.config.model_families import MODELS
from maxlite.config.model_function import function_keys
from maxlite.config.raw_values import show
from maxlite.config.schema import DEFAULTS, Config, ModelConfig, build
from maxlite.config.values import Setting, parse
from maxlite.errors import UserError
from maxlite.hf import block_fp8, packed_int4
from maxlite.hf.families import FAMILIES
from maxlite.hf.family import WITHOUT_EFFECT, HfFamily
from maxlite.hf.hf_folder import CONFIG, read_config, read_tensors
from maxlite.hf.hf_tokenizer import tokenizer_keys
from maxlite.hf.text_model import (
  LARGER_MODELS,
  nested,
  quantization_of,
  text_values,
  with_alternatives,
  without_base_prefix,
)
from maxlite.storage.json_values import Json, JsonObject

LARGE = 10**6  # sizes up to this are plausible
CONTEXT = "max_position_embeddings"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of an imported config.json about files that an export does not have.
NOT_EXPORTED = ("auto_map", "quantization_config")


def model_keys(directory: Path) -> tuple[HfFamily, JsonObject]:
  """Return (family, our keys) for a Hugging Face folder.

  Raises:
    UserError: config.json is missing, of an unknown family, or has unsupported values or keys.
  """
  values = read_config(directory)
  file = directory / CONFIG
  quantization = quantization_of(values)
  # A text, which a damaged file may not have here.
  is_part = str(values.get("model_type")) in LARGER_MODELS
  family, values = _family_of(values, file)
  if quantization:
    _require_readable(quantization, family, file)
  if is_part:
    family = nested(family, read_tensors(directory))
  typed = _typed_keys(family, values, file)
  names = family.key_names(values)
  _require_plausible(typed, directory, names)
  if family.mtp is not None:
    # transformers drops these layers when it saves a model, but keeps the key of config.json.
    tensors = read_tensors(directory)
    stored = family.mtp.stored_prefixes(typed["base_num_decoder_layers"], tensors)
    typed["mtp_num_layers"] = min(typed["mtp_num_layers"], len(stored))
  # Rows so short that every model supports them; the run checks its own length.
  any_run = {"dataset_type": "synthetic", "max_target_length": 8}
  cfg: Config = build(Config, DEFAULTS | typed | any_run)
  with _named_as_there(names):
    validate(cfg, dict.fromkeys(typed, str(file)), needs_data=False)
  if family.base_prefix:
    family = without_base_prefix(family, read_tensors(directory))
  if family.alternatives:
    family = with_alternatives(family, read_tensors(directory), typed["base_emb_dim"])
  return family, typed


def keys_of_folder(directory: Path) -> JsonObject:
  """Return our keys for the model and the tokenizer in a Hugging Face folder.

  Raises:
    UserError: as `model_keys`.
  """
  _, keys = model_keys(directory)
  return {**keys, "scan_layers": True, **tokenizer_keys(directory)}


def _typed_keys(family: HfFamily, values: JsonObject, file: Path) -> JsonObject:
  """Return our keys for the values of a config.json, checked like a command line."""
  try:
    keys = family.config_from_hf(values)
  except KeyError as error:
    raise UserError(f"{file} lacks {error}: copy it again") from None
  except ZeroDivisionError:
    raise UserError(f"{file} has {_zeros(values)}: a size cannot be 0") from None
  except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
    raise UserError(f"{file}: {error}") from None
  keys = {"decoder_block": family.decoder_block, **keys}
  typed = {}
  with _named_as_there(family.key_names(values)):
    for name, value in keys.items():
      setting = Setting(name, _as_text(value), str(file))
      typed[name] = parse(setting)
  return typed


def _zeros(values: Mapping[str, Json]) -> str:
  """List the keys of a config.json, or of an object in it, that are 0."""
  zeros = []
  for name, value in values.items():
    if isinstance(value, dict):
      zeros.append(_zeros(value))
    elif type(value) in (int, float) and not value and name not in WITHOUT_EFFECT:
      zeros.append(f"{name}=0")
  return ", ".join(filter(None, zeros))


@contextlib.contextmanager
def _named_as_there(names: Mapping[str, str]) -> Iterator[None]:
  """Write the keys of config.json, `names` by our keys, in the message of a UserError."""
  try:
    yield
  except UserError as error:
    text = re.sub(r"\w+(?==)", lambda match: names.get(match[0], match[0]), str(error))
    raise UserError(text) from None


def _family_of(values: JsonObject, file: Path) -> tuple[HfFamily, JsonObject]:
  """Return (family, config.json that it reads: of the text model of a larger one)."""
  model_type = values.get("model_type")
  if str(model_type) in LARGER_MODELS:
    values = text_values(values, file)
    return FAMILIES[values["model_type"]], values
  if str(model_type) not in FAMILIES:
    supported = ", ".join([*FAMILIES, *LARGER_MODELS])
    raise UserError(f"{file} has model_type={model_type!r}; supported are {supported}")
  return FAMILIES[str(model_type)], values


def _require_readable(quantization: Json, family: HfFamily, file: Path) -> None:
  """Raise UserError unless weights that are quantized in this way can be read."""
  method = None
  if isinstance(quantization, dict):
    method = quantization.get("quant_method")
  if method == block_fp8.METHOD:
    block_fp8.block_shape_of(quantization)
  elif method == packed_int4.METHOD:
    packed_int4.require_int4(quantization)
  elif method is None or method != family.quantized:
    raise UserError(f"{file} has quantization_config: save the weights as bfloat16 first")


def find_family(cfg: ModelConfig) -> tuple[HfFamily, JsonObject]:
  """Return (family, config.json) from which the model of `cfg` can be read back.

  Raises:
    UserError: there is none; lists the keys that would be lost.
  """
  reason = f"no supported Hugging Face family has decoder_block={cfg.decoder_block}"
  for family in FAMILIES.values():
    if cfg.decoder_block not in (family.decoder_block, *family.variants):
      continue
    hf = {"architectures": [family.architecture], "model_type": family.exported_as}
    hf |= family.config_to_hf(cfg)
    try:
      read_back = {"decoder_block": family.decoder_block} | family.config_from_hf(hf)
    except UserError as error:
      reason = f"{family.model_type} cannot express it: {error}"
      continue
    read_back = DEFAULTS | read_back
    wanted = function_keys(cfg) | {"decoder_block": cfg.decoder_block}
    different = []
    for name, value in wanted.items():
      if read_back[name] != value:
        different.append(f"{name}={show(value)}")
    if not different:
      return family, hf
    lost = " ".join(different)
    reason = f"no supported Hugging Face family has {lost}"
  raise UserError(f"{reason}: this model cannot be exported")


def exported_config(
  cfg: ModelConfig, source: JsonObject | None, max_target_length: int, *, is_trained: bool
) -> tuple[HfFamily, JsonObject, bool]:
  """Return (family, config.json, whether it is `source`) of the model `cfg`.

  Args:
    source: a config.json, from which the model may have been imported. If it describes the model,
      it is returned with what an export changes.
    max_target_length: tokens of a row.
    is_trained: whether it was trained on such rows, to which a smaller `max_position_embeddings`
      of an import is raised.

  Raises:
    UserError: no family can express the model.
  """
  imported = _imported_config(cfg, source or {})
  if imported is not None:
    family, hf = imported
    if is_trained:
      hf = _with_context(family, hf, max_target_length)
    return family, hf, True
  family, hf = find_family(cfg)
  # Some classes have a default of pad_token_id with which they refuse a small vocabulary.
  return family, {"pad_token_id": None} | _with_context(family, hf, max_target_length), False


def _imported_config(cfg: ModelConfig, values: JsonObject) -> tuple[HfFamily, JsonObject] | None:
  """Return (family, config.json) if `cfg` was imported from the config.json `values`, else None.

  The model may have a larger vocabulary and fewer layers of multi-token prediction than there.
  """
  file = Path(CONFIG)
  try:
    family, text = _family_of(values, file)
    keys = _typed_keys(family, text, file)
  except UserError:  # of a model that maxlite does not read
    return None
  changed = {"vocab_size": cfg.vocab_size, "mtp_num_layers": cfg.mtp_num_layers}
  model = build(ModelConfig, DEFAULTS | keys | changed)
  is_same = model.decoder_block == cfg.decoder_block and function_keys(model) == function_keys(cfg)
  if not is_same or keys["vocab_size"] > cfg.vocab_size:
    return None
  # As in the files of transformers, which drops layers of multi-token prediction but not their key.
  changed["vocab_size"] = keys["vocab_size"]
  if cfg.mtp_num_layers:
    changed["mtp_num_layers"] = keys["mtp_num_layers"]
  before = family.config_to_hf(build(ModelConfig, DEFAULTS | keys | changed))
  hf = {**text, **{name: values[name] for name in TOKEN_IDS if name in values}}
  for name in NOT_EXPORTED:
    hf.pop(name, None)
  for name, value in family.config_to_hf(cfg).items():
    if value != before.get(name):
      hf[name] = value
  hf |= {"architectures": [family.architecture], "model_type": family.exported_as}
  return family, hf


def _with_context(family: HfFamily, hf: JsonObject, max_target_length: int) -> JsonObject:
  """Return `hf` with at least this context length, unless the model depends on the length."""
  if MODELS[family.decoder_block].positions == "learned":  # as many as the table has
    return hf
  longer = hf | {CONTEXT: max(hf.get(CONTEXT) or 0, max_target_length)}
  if CONTEXT not in hf or family.config_from_hf(longer) == family.config_from_hf(hf):
    return longer
  return hf


def has_mtp_tensors(cfg: ModelConfig) -> bool:
  """Return whether a family of the model can have layers of multi-token prediction."""
  for family in FAMILIES.values():
    is_of_family = cfg.decoder_block in (family.decoder_block, *family.variants)
    if is_of_family and family.mtp is not None:
      return True
  return False


def _require_plausible(keys: Mapping[str, Json], directory: Path, names: Mapping[str, str]) -> None:
  """Raise UserError for a size larger than all weights, before anything of that size is built."""
  tensors = read_tensors(directory)
  num_weights = sum(math.prod(tensor.shape) for tensor in tensors.values())
  limits = {"base_num_decoder_layers": len(tensors)}
  for name, value in keys.items():
    if isinstance(value, int) and value > limits.get(name, max(num_weights, LARGE)):
      raise UserError(
        f"{directory / CONFIG} implies {names.get(name, name)}={value}, but there are "
        f"{num_weights} weights in all, in {len(tensors)} tensors: one of the two is of another "
        "model"
      )


def _as_text(value: Json) -> Json:
  """Return a value as the command line would have it, so that it is checked in the same way."""
  if isinstance(value, tuple | list):
    return tuple(map(_as_text, value))
  if isinstance(value, bool):
    return str(value).lower()
  return str(value)
