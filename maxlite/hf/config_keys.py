"""Pairs of config keys and keys of config.json with the same values, and rotary embeddings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.schema import ModelConfig, flatten

REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Key:
  """A config key and the key of config.json with the same value."""

  ours: str
  theirs: str
  default: Any = REQUIRED  # value if config.json lacks the key or has null
  alias: str = ""  # another spelling that is read
  writes_null: bool = False  # whether the default is written as null


def read_keys(keys: Sequence[Key], hf: Mapping[str, Any]) -> dict[str, Any]:
  """Return our keys with the values of config.json."""
  values = {}
  for key in keys:
    name = key.alias if key.alias in hf and key.theirs not in hf else key.theirs
    value = hf[name] if key.default is REQUIRED else hf.get(name)
    use_default = value is None and key.default is not REQUIRED
    values[key.ours] = key.default if use_default else value
  return values


def write_keys(keys: Sequence[Key], flat: Mapping[str, Any]) -> dict[str, Any]:
  """Return the keys of config.json with the values of our flat keys; the inverse of read_keys."""
  is_null = lambda key: key.writes_null and flat[key.ours] == key.default
  return {key.theirs: None if is_null(key) else flat[key.ours] for key in keys}


def require(hf: Mapping[str, Any], **values: Any) -> None:
  """Raise UserError unless config.json has these values, null, or no such keys."""
  for name, value in values.items():
    if hf.get(name) not in (None, value):
      raise UserError(
        f"config.json has {name}={hf[name]!r}, but maxlite supports only {name}={value!r} here: "
        "choose another checkpoint"
      )


_FACTOR = Key("rope_factor", "factor")
_ORIGINAL = Key("original_max_position_embeddings", "original_max_position_embeddings")
ROPE_KEYS: dict[str, Sequence[Key]] = {
  "default": (),
  "linear": (_FACTOR,),
  "llama3": (_FACTOR, _ORIGINAL),
  "yarn": (
    _FACTOR,
    _ORIGINAL,
    Key("beta_fast", "beta_fast", 32.0),
    Key("rope_truncate", "truncate", True),
    Key("mscale", "mscale", 0.0),
  ),
}
ROPE_REQUIRED = {
  "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
  "yarn": {"beta_slow": 1},
}
ROPE_TYPES = {"llama3": "llama3.1"}  # config.json's rope_type: ours, where they differ


def rope_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Return our keys of the rotary embedding.

  Newer files have `rope_parameters`, older ones `rope_theta` and, if scaled, `rope_scaling`.
  """
  rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
  kind = rope.get("rope_type") or rope.get("type") or "default"
  thetas = (rope.get("rope_theta"), hf.get("rope_theta"), 10_000.0)
  theta = next(theta for theta in thetas if theta is not None)
  if kind not in ROPE_KEYS:
    raise UserError(
      f"config.json has a rotary embedding of type {kind!r}; supported are {', '.join(ROPE_KEYS)}"
    )
  require(rope, **ROPE_REQUIRED.get(kind, {}))
  if kind == "yarn":
    require(rope, attention_factor=None)
    mscale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale != all_dims:
      raise UserError(
        f"config.json has mscale={mscale} and mscale_all_dim={all_dims}, but maxlite supports yarn "
        "only with one value for both: choose another checkpoint"
      )
    if not rope.get(_ORIGINAL.theirs):
      rope = {**rope, _ORIGINAL.theirs: hf["max_position_embeddings"]}
  keys = {"rope_type": ROPE_TYPES.get(kind, kind), "rope_max_timescale": float(theta)}
  return keys | read_keys(ROPE_KEYS[kind], rope)


def rope_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  """Return both forms of config.json, for tools that read only the older one."""
  rope = cfg.rope
  types = {ours: theirs for theirs, ours in ROPE_TYPES.items()}
  kind = types.get(rope.rope_type, rope.rope_type)
  scaling = {"rope_type": kind, **write_keys(ROPE_KEYS[kind], flatten(rope))}
  scaling |= ROPE_REQUIRED.get(kind, {})
  if scaling.pop("mscale", 0.0) and cfg.family.latent_attention:
    scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale}
  theta = {"rope_theta": rope.rope_max_timescale}
  keys = {"rope_parameters": scaling | theta, **theta}
  if kind == "default":
    return keys
  length = int(rope.original_max_position_embeddings * rope.rope_factor)
  return keys | {"rope_scaling": scaling, "max_position_embeddings": length}
