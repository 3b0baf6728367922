"""Rotary embeddings in config.json.

Newer files have `rope_parameters`, older ones `rope_theta` and, if scaled, `rope_scaling`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.schema import ModelConfig, flatten
from maxlite.hf.config_keys import Key, read_keys, require, write_keys

_FACTOR = Key("rope_factor", "factor")
_ORIGINAL = Key("original_max_position_embeddings", "original_max_position_embeddings")
KEYS: dict[str, Sequence[Key]] = {
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
REQUIRED = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}, "yarn": {"beta_slow": 1}}
TYPES = {"llama3": "llama3.1"}  # config.json's rope_type: ours, where they differ


def rope_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Return our keys of the rotary embedding, from either form of config.json."""
  older_theta, older = hf.get("rope_theta"), hf.get("rope_scaling")
  rope = hf.get("rope_parameters") or older or {}
  kind = rope.get("rope_type") or rope.get("type") or "default"
  theta = rope.get("rope_theta") or older_theta or 10_000.0
  if kind not in KEYS:
    raise UserError(
      f"config.json has a rotary embedding of type {kind!r}; supported are {', '.join(KEYS)}"
    )
  require(rope, **REQUIRED.get(kind, {}))
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
  keys = {"rope_type": TYPES.get(kind, kind), "rope_max_timescale": float(theta)}
  return keys | read_keys(KEYS[kind], rope)


def rope_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  """Return both forms of config.json, for tools that read only the older one."""
  rope = cfg.rope
  kind = next((theirs for theirs, ours in TYPES.items() if ours == rope.rope_type), rope.rope_type)
  scaling = {"rope_type": kind} | write_keys(KEYS[kind], flatten(rope)) | REQUIRED.get(kind, {})
  if scaling.pop("mscale", 0.0):
    scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale}
  theta = {"rope_theta": rope.rope_max_timescale}
  keys = {"rope_parameters": scaling | theta, **theta}
  if kind == "default":
    return keys
  length = int(rope.original_max_position_embeddings * rope.rope_factor)
  return keys | {"rope_scaling": scaling, "max_position_embeddings": length}
