"""The rotary embedding in config.json."""

import math
from collections.abc import Mapping, Sequence

from maxlite.config.schema import ModelConfig, flatten
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson, Key, read_keys, write_keys
from maxlite.storage.json_values import Json, JsonObject

ORIGINAL = "original_max_position_embeddings"
# Keys of `rope_parameters` in families whose local and global layers differ.
GLOBAL = "full_attention"
LOCAL = "sliding_attention"
_FACTOR = Key("rope_factor", "factor")
_ORIGINAL = Key(ORIGINAL, ORIGINAL)
_ATTENTION_FACTOR = Key("rope_attention_factor", "attention_factor", null=0.0, off=0.0)
ROPE_KEYS: dict[str, Sequence[Key]] = {
  "default": (),
  "linear": (_FACTOR,),
  "llama3": (_FACTOR, _ORIGINAL),
  "llama4": (_FACTOR, _ORIGINAL),
  "yarn": (
    _FACTOR,
    _ORIGINAL,
    Key("beta_fast", "beta_fast", null=32.0),
    Key("rope_truncate", "truncate", null=False),
    Key("mscale", "mscale"),
    _ATTENTION_FACTOR,
  ),
  "longrope": (
    _FACTOR,
    _ORIGINAL,
    Key("rope_short_factor", "short_factor"),
    Key("rope_long_factor", "long_factor"),
    _ATTENTION_FACTOR,
  ),
  "dynamic": (_FACTOR, _ORIGINAL),
}
ROPE_REQUIRED: dict[str, JsonObject] = {
  "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
  "llama4": {"low_freq_factor": 1.0, "high_freq_factor": 1.0},
  "yarn": {"beta_slow": 1},
}
ROPE_TYPES = {"llama3": "llama3.1"}  # config.json's rope_type: ours, where they differ
# Ours that has a rope_type of config.json with other values: of Llama 4 Scout.
OF_OTHER_VALUES = {"llama4": "llama3"}
# Keys of one type that have no effect in another.
ROPE_UNUSED = {
  "type", "factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale",
  "low_freq_factor", "high_freq_factor", "short_factor", "long_factor",
  # The positions of text are the same on all axes of an image.
  "mrope_section", "mrope_interleaved",
}  # fmt: skip


def rope_from_hf(hf: ConfigJson) -> JsonObject:
  """Return our keys of the rotary embedding.

  Newer files have `rope_parameters`, older ones `rope_theta` and, if scaled, `rope_scaling`, which
  wins where a file has both.
  """
  name, rope = rope_values(hf)
  return read_rope(rope, hf, name)


def rope_values(hf: ConfigJson) -> tuple[str, JsonObject]:
  """Return (key of config.json, object) of the rotary embedding, with its base and share."""
  name = "rope_scaling"
  rope = dict_of(hf, "rope_scaling")
  parameters = dict_of(hf, "rope_parameters")
  if not rope:
    name = "rope_parameters"
    rope = parameters
  rope.setdefault("rope_theta", hf.get("rope_theta"))
  if hf.get("partial_rotary_factor") is not None:
    rope.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor"))
  if ORIGINAL in hf:
    rope[ORIGINAL] = hf.get(ORIGINAL)
  return name, rope


def dict_of(hf: ConfigJson, name: str) -> JsonObject:
  """Return a copy of the object at `name`; of the default if it is missing or null."""
  value = hf.get(name)
  if value is None:
    value = hf.default(name)
  if value is None:
    return {}
  if not isinstance(value, Mapping):
    raise UserError(f"config.json has {name}={value!r}, not an object: copy it again")
  return dict(value)


def read_rope(values: JsonObject, hf: ConfigJson, name: str) -> JsonObject:
  """Return our keys of the rotary embedding `values`, which config.json has as `name`."""
  kind = values.get("rope_type", values.get("type", "default"))
  supported = [name for name in ROPE_KEYS if name not in OF_OTHER_VALUES]
  if kind not in supported:
    raise UserError(
      f"config.json has a rotary embedding of type {kind!r}; supported are {', '.join(supported)}"
    )
  if kind == "yarn":
    values = _complete_yarn(values, hf)
  elif kind == "longrope":
    values = _complete_longrope(values, hf)
  elif kind == "dynamic":
    values = values | {ORIGINAL: hf["max_position_embeddings"]}
  if kind != "yarn" and values.get("mscale_all_dim"):
    raise UserError(
      f"config.json has mscale_all_dim={values['mscale_all_dim']} for a rotary embedding of type "
      f"{kind}, but maxlite supports it only for yarn: choose another checkpoint"
    )
  if kind == "llama3" and ORIGINAL not in values:
    values = values | {ORIGINAL: hf["max_position_embeddings"]}
  if kind == "llama3" and values.get("high_freq_factor") == 1:
    kind = "llama4"
  rope = ConfigJson(
    values,
    defaults={"partial_rotary_factor": 1.0},
    nullable=("beta_fast", "truncate", "attention_factor"),
    prefix=f"{name}.",
  )
  for required, value in ROPE_REQUIRED.get(kind, {}).items():
    if required not in rope:
      raise KeyError(f"{name}.{required}")
    rope.require(**{required: value})
  keys = {
    "rope_type": ROPE_TYPES.get(kind, kind),
    "rope_max_timescale": float(rope["rope_theta"]),
    "partial_rotary_factor": float(rope["partial_rotary_factor"]),
  }
  keys |= read_keys(ROPE_KEYS[kind], rope)
  rope.require_no_others({"rope_type", "mscale_all_dim", *ROPE_UNUSED})
  return keys


def _complete_yarn(values: Mapping[str, Json], hf: ConfigJson) -> JsonObject:
  """Return `values` with defaults, and one `mscale` in place of two.

  With growth(m) = 0.1 m ln(factor) + 1, the rotated channels are scaled by `attention_factor` if it
  is given; else by growth(mscale) / growth(mscale_all_dim) if both are set and not zero; else by
  growth(1). Latent attention scales all scores by growth(mscale_all_dim)^2, if that is not zero.

  Raises:
    UserError: the factor is missing where maxlite needs it.
  """
  yarn = {"beta_fast": None, "beta_slow": None, "truncate": True, **values}
  yarn["beta_fast"] = yarn["beta_fast"] or None
  yarn["beta_slow"] = yarn["beta_slow"] or 1
  if ORIGINAL not in yarn:
    yarn[ORIGINAL] = hf["max_position_embeddings"]
  if yarn.get("factor", 0) is None:
    yarn["factor"] = hf["max_position_embeddings"] / yarn[ORIGINAL]
  mscale = yarn.get("mscale") or 0.0
  all_dims = yarn.get("mscale_all_dim") or 0.0
  if all_dims and values.get("factor") is None:
    raise UserError(
      f"config.json has mscale_all_dim={all_dims}, but no factor of yarn, which maxlite needs with "
      "it: choose another checkpoint"
    )
  yarn["mscale"] = all_dims
  yarn.setdefault("attention_factor", None)
  if _extends(yarn):
    factor = yarn["attention_factor"]
    if factor is None:
      factor = _growth(yarn, 1.0)
      if mscale and all_dims:
        factor = _growth(yarn, mscale) / _growth(yarn, all_dims)
    derived = 1.0 if all_dims else _growth(yarn, 1.0)  # what maxlite derives, from one mscale
    yarn["attention_factor"] = _unless_derived(factor, derived)
  return yarn


def _complete_longrope(values: Mapping[str, Json], hf: ConfigJson) -> JsonObject:
  """Return `values` with defaults; `attention_factor` is null if it is the one that is derived."""
  rope = dict(values)
  if ORIGINAL not in rope:
    rope[ORIGINAL] = hf["max_position_embeddings"]
  if rope.get("factor") is None:
    rope["factor"] = hf["max_position_embeddings"] / rope[ORIGINAL]
  for key in ("short_factor", "long_factor"):
    if isinstance(rope.get(key), list):
      rope[key] = tuple(rope[key])
  rope.setdefault("attention_factor", None)
  if rope["attention_factor"] is not None and _extends(rope) and rope[ORIGINAL] > 1:
    derived = math.sqrt(1 + math.log(rope["factor"]) / math.log(rope[ORIGINAL]))
    rope["attention_factor"] = _unless_derived(rope["attention_factor"], derived)
  return rope


def _extends(rope: Mapping[str, Json]) -> bool:
  """Return whether the factor of context extension is a valid one; others are refused later."""
  factor = rope.get("factor")
  return isinstance(factor, int | float) and factor >= 1


def _growth(yarn: Mapping[str, Json], mscale: float) -> float:
  """Return yarn's factor of queries and keys."""
  return 0.1 * mscale * math.log(yarn["factor"]) + 1


def _unless_derived(factor: float, derived: float) -> float | None:
  """Return `factor`, or None if it is the one that is derived from other keys."""
  if math.isclose(factor, derived, rel_tol=1e-9):
    return None
  return factor


def layered_rope_from_hf(hf: ConfigJson, local_theta: float | None) -> JsonObject:
  """Return our keys of the rotary embeddings of a family with local and global layers.

  Newer files have `rope_parameters` by layer type, older ones `rope_theta` and `rope_scaling` for
  global layers. `local_theta` is the base of local layers where `rope_parameters` has none.
  """
  ropes = ConfigJson(dict_of(hf, "rope_parameters"), {}, prefix="rope_parameters.")
  rope = dict_of(ropes, GLOBAL) | dict_of(hf, "rope_scaling")
  rope.setdefault("rope_theta", hf.get("rope_theta"))
  local = dict_of(ropes, LOCAL)
  local.setdefault("rope_theta", local_theta)
  ropes.require_no_others(())
  keys = read_rope(rope, hf, f"rope_parameters.{GLOBAL}")
  if keys["rope_type"] == "yarn" and not keys["rope_truncate"]:
    raise UserError(
      f"config.json has rope_parameters.{GLOBAL}.truncate=false, which transformers does not read: "
      "remove it, or choose another checkpoint"
    )
  local_keys = read_rope(local, hf, f"rope_parameters.{LOCAL}")
  if local_keys["rope_type"] != "default" or local_keys["partial_rotary_factor"] != 1:
    raise UserError(
      f"config.json has rope_parameters.{LOCAL} of rope_type={local_keys['rope_type']} and "
      f"partial_rotary_factor={local_keys['partial_rotary_factor']}, but maxlite supports only "
      "default and 1.0 there: choose another checkpoint"
    )
  timescale = local_keys["rope_max_timescale"]
  require_local_timescale(timescale)
  if keys["rope_type"] == "default" and keys["rope_max_timescale"] == timescale:
    timescale = 0.0
  return keys | {"local_rope_max_timescale": timescale}


def require_local_timescale(timescale: float) -> None:
  """Raise UserError for a base of local layers below 1; our key for 0 has another meaning."""
  if timescale < 1:
    raise UserError(
      f"config.json has rope_theta={timescale} in rope_parameters.{LOCAL}: write a number from 1"
    )


def layered_rope_to_hf(cfg: ModelConfig) -> JsonObject:
  """Return `rope_parameters` by layer type, and the older form of the global layers' keys."""
  keys = rope_to_hf(cfg)
  local = cfg.rope.local_rope_max_timescale or cfg.rope.rope_max_timescale
  ropes = {
    LOCAL: {"rope_type": "default", "rope_theta": local},
    GLOBAL: keys["rope_parameters"],
  }
  return keys | {"rope_parameters": ropes}


def rope_to_hf(cfg: ModelConfig) -> JsonObject:
  """Return both forms of config.json, for tools that read only the older one."""
  rope = cfg.rope
  types = {ours: theirs for theirs, ours in ROPE_TYPES.items()}
  kind = types.get(rope.rope_type, rope.rope_type)
  scaling = {
    "rope_type": OF_OTHER_VALUES.get(kind, kind),
    **write_keys(ROPE_KEYS[kind], flatten(rope)),
  }
  scaling |= ROPE_REQUIRED.get(kind, {})
  if scaling.pop("mscale", 0.0) and cfg.family.reads("mla"):
    scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale}
  if scaling.get("attention_factor") is None:
    scaling.pop("attention_factor", None)
  for key in ("short_factor", "long_factor"):
    if key in scaling:
      scaling[key] = list(scaling[key])
  base = {"rope_theta": rope.rope_max_timescale}
  if rope.partial_rotary_factor != 1:
    base["partial_rotary_factor"] = rope.partial_rotary_factor
  keys = {"rope_parameters": scaling | base, **base}
  if kind == "default":
    return keys
  keys["rope_scaling"] = scaling
  if kind != "linear":
    length = rope.original_max_position_embeddings
    if kind != "dynamic":
      length = int(length * rope.rope_factor)
    keys["max_position_embeddings"] = length
  return keys
