"""Variants of a config.json, and the logits that `transformers` and maxlite compute with them."""

import contextlib
import copy
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hf_measure import FIXTURES
from safetensors.numpy import load_file

import maxlite
from maxlite.errors import UserError
from maxlite.hf.families import FAMILIES
from maxlite.hf.family import WITHOUT_EFFECT
from maxlite.hf.hf_config import model_keys

LAYERS = ("full_attention", "sliding_attention")
LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
TWO_MSCALES = YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
LONGROPE = {
  "rope_type": "longrope",
  "rope_theta": 500.0,
  "original_max_position_embeddings": 32,
  "short_factor": [1.25, 3.0],
  "long_factor": [2.0, 8.0],
}
# Values of keys that a config.json may have in addition to those of its class.
OTHERS: dict[str, list[Any]] = {
  "rope_theta": [77.0, None],
  "rope_scaling": [
    {},
    {"type": "linear", "factor": 2.0},
    LLAMA3,
    YARN,
    YARN | {"truncate": None},
    TWO_MSCALES,
    YARN | {"attention_factor": 1.5},
    DYNAMIC,
    LONGROPE,
    LONGROPE | {"attention_factor": 1.5},
  ],
  "rope_parameters": [{}, {"rope_theta": 77.0}, LLAMA3, YARN, {**YARN, "factor": None}],
  "rope_local_base_freq": [77.0, None],
  "partial_rotary_factor": [0.5, 1.0, None],
  "original_max_position_embeddings": [8, None],
  "is_causal": [False, True, None],
  "head_dim": [2, 4, 8, None],
  "qk_head_dim": [2, None],
  "layer_types": [None, [], ["full_attention"] * 2, [*LAYERS], [*reversed(LAYERS)]],
  "sliding_window": [2, 0, None],
  "sliding_window_pattern": [2, 6, None],
  "_sliding_window_pattern": [2, None],
  "use_sliding_window": [True, False, None],
  "max_window_layers": [1, None],
  "attention_chunk_size": [2, None],
  "attention_bias": [True, False, None],
  "mlp_bias": [True, False, None],
  "tie_word_embeddings": [True, False, None],
  "num_experts": [2, 8, None],
  "num_local_experts": [2, 8, None],
  "moe_layer_freq": [1, 2, None],
  "scoring_func": ["sigmoid", "softmax", None],
  "topk_method": ["greedy", "group_limited_greedy", "noaux_tc", None],
  "clip_qkv": [0.5, None],
  "attn_logit_softcapping": [0.5, None],
  "final_logit_softcapping": [0.5, None],
  "hidden_act": ["gelu", "silu", None],
  "hidden_activation": ["silu", "gelu_pytorch_tanh", None],
  "rotary_dim": [2, 4, 6, None],
  "no_rope_layers": [None, [], [1, 1, 1, 0, 1], [1, 0, 1, 1, 1]],
  "first_k_dense_replace": [0, 1, 2, None],
  "mlp_layer_types": [None, ["dense"] * 2 + ["sparse"], ["sparse", "dense", "sparse"]],
  "per_layer_config": [{"0": {"rms_norm_eps": 0.5}}, None],
  "num_mtp_layers": [0, 1, None],
  "num_wings": [2, None],
}


@dataclasses.dataclass(frozen=True)
class Variant:
  """A config.json that differs from another in one key."""

  name: str
  values: dict[str, Any]


def config_of(model_type: str) -> dict[str, Any]:
  """Return the config.json of a fixture."""
  return json.loads((FIXTURES / model_type / "config.json").read_text())


def variants_of(model_type: str) -> Iterator[Variant]:
  """Yield variants of a fixture's config.json: one key removed, null, or changed."""
  base = config_of(model_type)
  yield from changed_keys(base, config_class(model_type), FAMILIES[model_type].unread)


def variants_of_larger(base: dict[str, Any]) -> Iterator[Variant]:
  """Yield variants of the config.json of a larger model: of its own keys, and of text_config's."""
  text = base["text_config"]
  unread = [name for name in base if name.endswith("_config")]
  for variant in changed_keys(base, config_class(base["model_type"]), ()):
    if variant.name.partition("=")[0].partition(" ")[0].partition(".")[0] not in unread:
      yield variant
  for variant in changed_keys(text, config_class(text["model_type"]), ()):
    yield Variant(f"text_config.{variant.name}", base | {"text_config": variant.values})


def changed_keys(base: dict[str, Any], cls: type, unread: Collection[str]) -> Iterator[Variant]:
  """Yield variants of a config.json `base`, which `cls` reads in transformers."""
  defaults = {}
  for field in dataclasses.fields(cls):
    defaults[field.name] = field.default
  names = {name for name in defaults if not name.startswith("_")}
  names |= set(base)
  names |= set(OTHERS)
  names |= WITHOUT_EFFECT
  names |= set(unread)
  for name in sorted(names - {"model_type", "quantization_config"}):
    if name in base:
      yield Variant(f"{name} removed", without(base, name))
    known = base.get(name, defaults.get(name))
    for value in [None, *changes(known), *OTHERS.get(name, [])]:
      yield Variant(f"{name}={value!r}", base | {name: value})
    if isinstance(base.get(name), dict):
      yield from inner_variants(base, name, base[name])


def inner_variants(base: dict[str, Any], name: str, inner: dict[str, Any]) -> Iterator[Variant]:
  """Yield variants with one key removed, null, or changed in an object inside config.json."""
  for key, value in inner.items():
    yield Variant(f"{name}.{key} removed", base | {name: without(inner, key)})
    for other in [None, *changes(value)]:
      yield Variant(f"{name}.{key}={other!r}", base | {name: inner | {key: other}})
    if isinstance(value, dict):
      for variant in inner_variants(inner, key, value):
        yield Variant(f"{name}.{variant.name}", base | {name: variant.values})
  for key in ("truncate", "partial_rotary_factor", "attention_factor", "num_wings", "mscale"):
    if key not in inner:
      yield Variant(f"{name}.{key}=0.5", base | {name: inner | {key: 0.5}})


# By type, values of the same kind.
CHANGES: dict[type, Callable[[Any], list[Any]]] = {
  bool: lambda value: [not value],
  int: lambda value: [value + 1, 2 * value, 0, 1],
  float: lambda value: [2 * value + 0.1, 0.0, 1.0],
  str: lambda value: ["other"],
  list: lambda value: [[], value[:-1], value[::-1]],
  dict: lambda value: [{}],
}


def changes(value: Any) -> list[Any]:
  """Return other values of the same kind."""
  if type(value) not in CHANGES:
    return [0, 1, 0.5, True, "other"]
  return CHANGES[type(value)](value)


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
  return {key: value for key, value in values.items() if key != name}


def config_class(model_type: str) -> type:
  """Return the config class of transformers."""
  from transformers import CONFIG_MAPPING

  if model_type == "kimi_k2":
    model_type = "deepseek_v3"
  return CONFIG_MAPPING[model_type]


def register_mistral4() -> None:
  """Add Mistral Small 4 to transformers' table of causal models, which lacks it."""
  import transformers

  transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
  )


def use_published_steps(model: Any) -> None:
  """Limit the steps of Nemotron-H as the code published with it does.

  transformers (5.23) raises them to time_step_min: huggingface/transformers#48989.
  """
  for module in model.modules():
    if type(module).__name__ == "NemotronHMamba2Mixer":
      module.time_step_limit = (0.0, float("inf"))


class Folder:
  """A copy of a fixture whose config.json is replaced."""

  def __init__(self, model_type: str, path: Path):
    self.path = path
    self.auto = "AutoModelForCausalLM"
    shutil.copytree(FIXTURES / model_type, path, dirs_exist_ok=True)
    expected = load_file(FIXTURES / model_type / "expected.safetensors")
    self.tokens_BT = expected["tokens_BT"]

  def write(self, values: dict[str, Any]) -> None:
    (self.path / "config.json").write_text(json.dumps(values))

  def our_keys(self, values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the keys of maxlite, or None if it refuses the config.json."""
    self.write(values)
    try:
      return model_keys(self.path)[1]
    except UserError as error:
      message = str(error)
    assert "config.json" in message
    assert "\n" not in message
    return None

  def our_logits(self, values: dict[str, Any]) -> np.ndarray | None:
    """Return the logits of maxlite, or None if it refuses the folder."""
    self.write(values)
    try:
      model, params = maxlite.load(self.path)
    except UserError:
      return None
    return np.asarray(model.apply(params, self.tokens_BT))

  def their_logits(self, values: dict[str, Any]) -> np.ndarray | None:
    """Return the logits of transformers, or None if it raises or lacks weights."""
    import torch
    import transformers

    torch.set_num_threads(1)  # several threads cost more than they save in such small models
    register_mistral4()
    values = copy.deepcopy(values)
    if values["model_type"] == "kimi_k2":
      values["model_type"] = "deepseek_v3"
    self.write(values)
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
      try:
        model, info = getattr(transformers, self.auto).from_pretrained(
          self.path,
          output_loading_info=True,
          attn_implementation="eager",
          dtype="float32",
        )
        if info["missing_keys"] or info["mismatched_keys"]:
          return None
        use_published_steps(model)
        with torch.no_grad():
          tokens = torch.tensor(self.tokens_BT).long()
          return model(input_ids=tokens, use_cache=False).logits.numpy()
      except Exception:  # whatever it raises, there is no function to compare with
        return None


class LargerFolder(Folder):
  """A folder of a model that reads images too."""

  def __init__(self, path: Path):
    self.path = path
    self.auto = "AutoModelForImageTextToText"
    # Without 0 and 1, the numbers that variants give to tokens of images.
    self.tokens_BT = 2 + np.arange(24, dtype=np.int32).reshape(2, 12)
