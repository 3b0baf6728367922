"""Rules that hold between keys, as far as they can be judged without devices.

A rule is a function that yields a complaint for each thing that does not fit; RULES lists them.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from maxlite.config import data_rules
from maxlite.config.checkpoint_rules import local_checkpoints
from maxlite.config.complaint import Complaint, Complaints
from maxlite.config.errors import UserError
from maxlite.config.phases import DRAFT_LOSSES
from maxlite.config.schema import DEFAULTS, MESH_AXES, Config, flatten
from maxlite.config.values import did_you_mean, show

LINEAR = ("linear", "linear_plus_one")

# Sources that are not at fault: a default fits by itself, and so does what all members share.
DEFAULT, SHARED = "default", "shared"


def validate(config: Config, source: Mapping[str, str], *, needs_data: bool) -> None:
  """Raises on the first complaint.

  Args:
    source: where each key was set that is not at its default.
    needs_data: whether data files must exist.

  Raises:
    UserError: one line that names the keys with their values and sources.
  """
  rules = RULES + DATA_RULES if needs_data else RULES
  for rule in rules:
    for complaint in rule(config):
      raise UserError(_line(complaint, flatten(config), source))


def _line(complaint: Complaint, values: Mapping[str, object], source: Mapping[str, str]) -> str:
  sources = [source.get(key, DEFAULT) for key in complaint.keys]
  where = next((s for s in sources if s not in (DEFAULT, SHARED)), sources[0])
  told = [
    f"{key}={show(values[key])}" + (f" ({s})" if s != where else "")
    for key, s in zip(complaint.keys, sources, strict=True)
  ]
  return f"{where}: {' with '.join(told)}: {complaint.text}"


def is_folder_name(name: str) -> bool:
  """Whether `name` names one folder, that of a run or a member."""
  odd = name.startswith(".") or not name.isprintable() or set(name) & set("/\\")
  return bool(name) and not odd


def _run_name(c: Config) -> Complaints:
  if not is_folder_name(c.run.run_name):
    text = "must name one folder; write run_name=NAME without slashes or a leading dot"
    yield Complaint(("run_name",), text)


def _profile(c: Config) -> Complaints:
  last = c.observe.skip_first_n_steps_for_profiler + c.observe.profiler_steps
  if c.observe.profiler and last > c.run.steps:
    keys = ("profiler", "skip_first_n_steps_for_profiler", "profiler_steps", "steps")
    yield Complaint(keys, f"the trace ends after the run; write steps={last} or more")


def _evaluation(c: Config) -> Complaints:
  if c.observe.eval_steps == 0:
    yield Complaint(("eval_steps",), "evaluates nothing; write 1 or more, or eval_steps=-1 for all")


def _has_latent_attention(c: Config) -> bool:
  return c.model.family.latent_attention


def _is_mixture(c: Config) -> bool:
  return c.model.family.is_moe


def _has_dense_layers(c: Config) -> bool:
  moe = c.model.moe
  return bool(moe.first_num_dense_layers) or moe.interleave_moe_layer_step > 1


def _heads(c: Config) -> Complaints:
  m = c.model
  latent = _has_latent_attention(c)
  if not latent and m.base_num_query_heads % m.base_num_kv_heads:
    keys = ("base_num_query_heads", "base_num_kv_heads")
    fix = f"write base_num_kv_heads={_divisor(m.base_num_query_heads, m.base_num_kv_heads)}"
    yield Complaint(keys, f"query heads must be a multiple of key/value heads; {fix}")
  key = "qk_rope_head_dim" if latent else "head_dim"
  channels = flatten(m)[key]
  if channels % 2:
    fix = f"write {key}={channels + 1}"
    yield Complaint((key,), f"rotary embedding pairs channels, so it must be even; {fix}")


def _attention(c: Config) -> Complaints:
  m = c.model
  if _has_latent_attention(c):
    for key in ("sliding_window_size", "attn_logits_soft_cap", "query_pre_attn_scalar"):
      if flatten(m)[key]:
        yield Complaint((key, "decoder_block"), f"latent attention has none; write {key}=0")
  if m.rope.local_rope_max_timescale and not m.family.global_layer_every:
    text = "all layers turn alike in this family; write local_rope_max_timescale=0"
    yield Complaint(("local_rope_max_timescale", "decoder_block"), text)
  sinks = m.family.sinks
  if m.attention == "dot_product" and (m.attn_logits_soft_cap or sinks):
    key = "decoder_block" if sinks else "attn_logits_soft_cap"
    what = "sinks" if sinks else "soft cap"
    yield Complaint(("attention", key), f"this backend knows no {what}; write attention=chunked")


def _stretch(c: Config) -> Complaints:
  rope = c.model.rope
  if rope.rope_type != "yarn":
    for key in ("mscale", "beta_fast", "rope_truncate"):
      if flatten(rope)[key] != DEFAULTS[key]:
        text = f"is only read by yarn; write {key}={show(DEFAULTS[key])}"
        yield Complaint((key, "rope_type"), text)
  if rope.rope_factor == 1 and rope.rope_type != "default":
    keys = ("rope_factor", "rope_type")
    yield Complaint(keys, "stretches nothing; write rope_type=default, or a larger rope_factor")
  if rope.rope_max_timescale == 1 and rope.rope_type == "yarn":
    keys = ("rope_max_timescale", "rope_type")
    yield Complaint(keys, "all channels turn alike; write rope_max_timescale=10000")


def _experts(c: Config) -> Complaints:
  moe = c.model.moe
  if not _is_mixture(c):
    return
  if moe.num_experts == 1:
    keys = ("num_experts", "decoder_block")
    yield Complaint(keys, "one expert is a dense model; write decoder_block=llama")
  elif moe.num_experts_per_tok > moe.num_experts:
    keys = ("num_experts_per_tok", "num_experts")
    fix = f"write num_experts_per_tok={moe.num_experts} or less"
    yield Complaint(keys, f"a token cannot go to more experts than there are; {fix}")


def _layer_plan(c: Config) -> Complaints:
  moe, num_layers = c.model.moe, c.model.base_num_decoder_layers
  if not _is_mixture(c):
    return
  num_dense, step = moe.first_num_dense_layers, moe.interleave_moe_layer_step
  if num_dense >= num_layers:
    fix = f"write first_num_dense_layers={num_layers - 1} or less, or decoder_block=llama"
    keys = ("first_num_dense_layers", "base_num_decoder_layers")
    yield Complaint(keys, f"leaves no layer for experts; {fix}")
  elif (num_layers - num_dense) % step:
    of = ("interleave_moe_layer_step", "base_num_decoder_layers", "first_num_dense_layers")
    fix = f"write interleave_moe_layer_step={_divisor(num_layers - num_dense, step)}"
    yield Complaint(of, f"does not divide the {num_layers - num_dense} other layers; {fix}")


def _routing_groups(c: Config) -> Complaints:
  moe = c.model.moe
  if not _is_mixture(c) or moe.router not in ("group_limited_greedy", "sigmoid_group_topk"):
    return
  num_groups, kept, chosen = moe.n_routing_groups, moe.topk_routing_group, moe.num_experts_per_tok
  if moe.num_experts % num_groups:
    fix = f"write n_routing_groups={_divisor(moe.num_experts, num_groups)}"
    yield Complaint(("n_routing_groups", "num_experts"), f"groups must be of one size; {fix}")
  elif kept > num_groups:
    fix = f"write topk_routing_group={num_groups} or less"
    keys = ("topk_routing_group", "n_routing_groups")
    yield Complaint(keys, f"a token cannot go to more groups than there are; {fix}")
  elif kept * moe.num_experts // num_groups < chosen:
    open_experts = kept * moe.num_experts // num_groups
    of = ("num_experts_per_tok", "topk_routing_group", "n_routing_groups", "num_experts")
    fix = f"write num_experts_per_tok={open_experts} or less, or a larger topk_routing_group"
    yield Complaint(of, f"the groups a token may go to hold {open_experts} experts; {fix}")


def _router(c: Config) -> Complaints:
  moe = c.model.moe
  if not _is_mixture(c):
    return
  if moe.router == "softmax_topk" and not moe.norm_topk_prob:
    text = "its weights always sum to one; write router=topk_softmax or norm_topk_prob=true"
    yield Complaint(("norm_topk_prob", "router"), text)
  grouped = ("group_limited_greedy", "sigmoid_group_topk")
  if moe.n_routing_groups > 1 and moe.router not in grouped:
    text = f"this router knows no groups; write router={grouped[0]} or n_routing_groups=1"
    yield Complaint(("n_routing_groups", "router"), text)


def _dispatch(c: Config) -> Complaints:
  """Rules between the ways in which tokens reach their experts."""
  moe = c.model.moe
  if not _is_mixture(c):
    return
  for key in ("capacity_factor", "ragged_buffer_factor"):
    if -1 < flatten(moe)[key] <= 0:
      yield Complaint(
        (key,), f"leaves no room for a token; write {key}=1.25, or -1 to drop nothing"
      )
  if moe.sparse_matmul and moe.capacity_factor != -1:
    fix = "write sparse_matmul=false or capacity_factor=-1"
    yield Complaint(("capacity_factor", "sparse_matmul"), f"sparse matmuls have no slots; {fix}")
  if moe.ragged_buffer_factor != -1 and (moe.use_ring_of_experts or not moe.sparse_matmul):
    key = "use_ring_of_experts" if moe.use_ring_of_experts else "sparse_matmul"
    text = "only the ragged all-to-all has that buffer; write ragged_buffer_factor=-1"
    yield Complaint(("ragged_buffer_factor", key), text)
  if moe.use_ring_of_experts and not moe.sparse_matmul:
    text = "the ring serves sparse matmuls; write sparse_matmul=true or use_ring_of_experts=false"
    yield Complaint(("use_ring_of_experts", "sparse_matmul"), text)


def _grouped_matmul(c: Config) -> Complaints:
  moe = c.model.moe
  if not _is_mixture(c):
    return
  if moe.grouped_matmul == "megablox" and not moe.megablox:
    text = "one asks for Megablox, one forbids it; write megablox=true or grouped_matmul=auto"
    yield Complaint(("grouped_matmul", "megablox"), text)
  if moe.grouped_matmul != "auto" and not moe.sparse_matmul:
    text = "only sparse matmuls are grouped; write grouped_matmul=auto or sparse_matmul=true"
    yield Complaint(("grouped_matmul", "sparse_matmul"), text)


def _tiles(c: Config) -> Complaints:
  for key, tile in flatten(c.model.moe.tiles).items():
    if len(tile) not in (0, 3):
      text = f"a tile is [rows, embed, mlp]; write {key}=[512, 1024, 1024], or [] to have it chosen"
      yield Complaint((key,), text)


def _topology(c: Config) -> Complaints:
  plan = c.plan
  if plan.compile_topology_num_slices > 1 and not plan.compile_topology:
    keys = ("compile_topology_num_slices", "compile_topology")
    yield Complaint(keys, "slices of what? write compile_topology=v5p-64 or its like")
  if plan.gpu_target_config and not os.path.isfile(os.path.expanduser(plan.gpu_target_config)):
    text = "no such file; write gpu_target_config=FILE, or leave it out for the estimate only"
    yield Complaint(("gpu_target_config",), text)


def _activations(c: Config) -> Complaints:
  names = c.model.mlp_activations
  if not names or names[0] in LINEAR or names[1:] not in ((), *zip(LINEAR)):
    text = "must be one activation, or one and `linear`; write mlp_activations=[silu, linear]"
    yield Complaint(("mlp_activations",), text)


def _remat(c: Config) -> Complaints:
  custom, saves = c.model.remat_policy == "custom", bool(c.model.remat_saved_names)
  keys = ("remat_saved_names", "remat_policy")
  if saves and not custom:
    yield Complaint(keys, "is only read by a custom policy; write remat_policy=custom")
  if custom and not saves:
    yield Complaint(
      keys, "a custom policy must save something; write remat_saved_names=[query_proj]"
    )


def _ensemble(c: Config) -> Complaints:
  e = c.ensemble
  if not e.members and not e.sweep:
    for key, value in flatten(e).items():
      if value != DEFAULTS[key]:
        text = f"there is no ensemble; write members or sweep, or {key}={show(DEFAULTS[key])}"
        yield Complaint((key,), text)
  elif e.ensemble_strategy not in ("auto", "processes"):
    for key in ("ensemble_executor", "ensemble_num_workers"):
      if flatten(e)[key] != DEFAULTS[key]:
        text = "this strategy starts no processes; write ensemble_strategy=processes"
        yield Complaint((key, "ensemble_strategy"), text)


def _asha(c: Config) -> Complaints:
  factor, min_steps = c.ensemble.asha_reduction_factor, c.ensemble.asha_min_steps
  if factor == 1:
    text = "would stop no member; write asha_reduction_factor=2 or more, or 0 for no early stopping"
    yield Complaint(("asha_reduction_factor",), text)
  if factor > 1 and min_steps >= c.run.steps:
    text = f"the run ends before that rung; write asha_min_steps={max(c.run.steps // 4, 1)}"
    yield Complaint(("asha_min_steps", "steps"), text)


def _schedule(c: Config) -> Complaints:
  o = c.optimizer
  if o.learning_rate_schedule_steps == 0:
    text = "has no length; write 1 or more, or learning_rate_schedule_steps=-1 for all steps"
    yield Complaint(("learning_rate_schedule_steps",), text)
  if o.lr_schedule_type == "wsd" and o.warmup_steps_fraction + o.wsd_decay_steps_fraction > 1:
    keys = ("warmup_steps_fraction", "wsd_decay_steps_fraction")
    fix = f"write wsd_decay_steps_fraction={round(1 - o.warmup_steps_fraction, 6)} or less"
    yield Complaint(keys, f"warm-up and decay overlap; {fix}")


def _phases(c: Config) -> Complaints:
  p, e = c.phasing, c.ensemble
  if p.initial_phases and not p.phases:
    yield Complaint(
      ("initial_phases", "phases"), "there are no phases; write phases, or no warm-up"
    )
  for key in ("members", "sweep"):
    if flatten(e)[key] and p.phase_strategy == "separate":
      text = "a member's phases are one program; write phase_strategy=auto or switch"
      yield Complaint(("phase_strategy", key), text)


def _draft_heads(c: Config) -> Complaints:
  num_heads, length = c.model.num_draft_heads, c.data.max_target_length
  if num_heads and not any(phase.get("loss") in DRAFT_LOSSES for phase in c.phasing.phases):
    text = "no phase trains them; write phases with loss: match_head, or num_draft_heads=0"
    yield Complaint(("num_draft_heads",), text)
  if num_heads >= length:
    keys = ("num_draft_heads", "max_target_length")
    yield Complaint(keys, f"no row is that long; write num_draft_heads={min(3, length - 1)}")


def _moments(c: Config) -> Complaints:
  for key in ("adam_b1", "adam_b2", "muon_beta"):
    if flatten(c.optimizer)[key] == 1:
      yield Complaint((key,), f"would never move; write {key}={DEFAULTS[key]}")
  if c.training.ema_decay == 1:
    yield Complaint(("ema_decay",), "averages would never move; write ema_decay=0.999, or 0")
  if c.optimizer.opt_type == "adamw" and c.optimizer.adam_eps == 0:
    text = f"divides by zero where a gradient is zero; write adam_eps={DEFAULTS['adam_eps']}"
    yield Complaint(("adam_eps",), text)


def _degrees(c: Config) -> Complaints:
  degree = flatten(c.mesh)
  for group in ("ici", "dcn"):
    keys = [_degree_key(group, mesh_axis) for mesh_axis in MESH_AXES]
    for key in keys:
      if degree[key] == 0:
        yield Complaint((key,), f"no axis has 0 shards; write {key}=1")
    open_keys = tuple(key for key in keys if degree[key] == -1)
    if len(open_keys) > 1:
      first = min(open_keys, key=lambda key: DEFAULTS[key])
      text = f"one axis per group can take the devices that are left; write {first}=1"
      yield Complaint(open_keys, text)


def _axis_rules(c: Config) -> Complaints:
  seen: set[str] = set()
  for name, mesh_axes in c.mesh.logical_axis_rules:
    for mesh_axis in mesh_axes:
      if mesh_axis not in MESH_AXES:
        hint = did_you_mean(mesh_axis, MESH_AXES) or f"choose from {', '.join(MESH_AXES)}"
        yield Complaint(("logical_axis_rules",), f"{mesh_axis} is no mesh axis; {hint}")
    if len(set(mesh_axes)) < len(mesh_axes) or name in seen:
      yield Complaint(("logical_axis_rules",), f"write {name} once, and each mesh axis once in it")
    seen.add(name)


def _divisible(c: Config) -> Complaints:
  if c.mesh.logical_axis_rules:  # the user's table decides; the mesh judges it once it is built
    return
  sharded = [("tensor", key) for key in ("base_num_query_heads", *_tensor_dims(c), "vocab_size")]
  sharded.append(("context", "max_target_length"))
  if _is_mixture(c):
    sharded.append(("expert", "num_experts"))
  values = flatten(c)
  for mesh_axis, key in sharded:
    yield from _divides(values, (mesh_axis,), key)
  latents = ("q_lora_rank", "kv_lora_rank") if _has_latent_attention(c) else ()
  for key in ("base_emb_dim", *latents):
    yield from _divides(values, ("fsdp", "context", "expert"), key)


def _tensor_dims(c: Config) -> Iterator[str]:
  """Dimensions beside query heads and vocabulary that the tensor axis cuts."""
  if not _has_latent_attention(c):
    yield "base_num_kv_heads"
  if _is_mixture(c):
    yield "base_moe_mlp_dim"
  if not _is_mixture(c) or _has_dense_layers(c):
    yield "base_mlp_dim"
  if c.model.num_draft_heads:
    yield "base_emb_dim"


def _divides(values: Mapping[str, Any], mesh_axes: tuple[str, ...], key: str) -> Complaints:
  """A complaint where the degrees that are known (not -1) cannot divide the dimension `key`."""
  keys = [_degree_key(group, mesh_axis) for group in ("ici", "dcn") for mesh_axis in mesh_axes]
  used = tuple(name for name in keys if values[name] > 1)
  size, shards = values[key], prod(values[name] for name in used)
  if size % shards:
    fix = f"write degrees that make {_divisor(size, shards)}, or another {key}"
    yield Complaint((*used, key), f"{shards} shards do not divide {size}; {fix}")


def _degree_key(group: str, mesh_axis: str) -> str:
  return f"{group}_{mesh_axis}_parallelism"


def _divisor(number: int, limit: int) -> int:
  """The largest divisor of `number` up to `limit`."""
  return max(d for d in range(1, min(limit, number) + 1) if number % d == 0)


Rule = Callable[[Config], Complaints]
RULES: tuple[Rule, ...] = (
  _run_name,
  _profile,
  _heads,
  _attention,
  _stretch,
  _experts,
  _layer_plan,
  _routing_groups,
  _router,
  _dispatch,
  _grouped_matmul,
  _tiles,
  _topology,
  _activations,
  _remat,
  data_rules.tokenizer,
  data_rules.chat,
  data_rules.columns,
  data_rules.batch,
  data_rules.sampling,
  _ensemble,
  _asha,
  _schedule,
  _phases,
  _draft_heads,
  _moments,
  _degrees,
  _axis_rules,
  _divisible,
  local_checkpoints,
)
DATA_RULES: tuple[Rule, ...] = (data_rules.datasets, _evaluation)
