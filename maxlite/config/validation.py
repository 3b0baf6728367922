"""Validate a config: the rules between keys that need no devices.

A rule function yields `(violated, keys, text)` for each of its rules, in order: whether the config
violates it, the keys that it is about, and the rule with what to write instead.
"""

import glob
import os
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.raw_values import show
from maxlite.config.registry import DRAFT_LOSSES, GROUP_ROUTERS
from maxlite.config.schema import DEFAULTS, MESH_AXES, Config, flatten
from maxlite.config.values import did_you_mean

Rules = Iterator[tuple[Any, str, str]]
# Sources that are not at fault: defaults are consistent, and so are the keys that members share.
DEFAULT, SHARED = "default", "shared"
_LINEAR = ("linear", "linear_plus_one")


def is_folder_name(name: str) -> bool:
  """Whether `name` is the name of one folder, as needed for a run or a member."""
  return bool(name) and name.isprintable() and name[0] != "." and not set(name) & set("/\\")


def _is_file(path: str) -> bool:
  return os.path.isfile(os.path.expanduser(path))


def _largest_divisor(number: int, limit: int) -> int:
  """The largest divisor of `number` up to `limit`."""
  return max(d for d in range(1, min(limit, number) + 1) if number % d == 0)


def _run(c: Config) -> Rules:
  text = "must name one folder; write run_name=NAME without slashes or a leading dot"
  yield not is_folder_name(c.run.run_name), "run_name", text
  end = c.observe.skip_first_n_steps_for_profiler + c.observe.profiler_steps
  keys = "profiler skip_first_n_steps_for_profiler profiler_steps steps"
  text = f"the trace ends after the run; write steps={end} or more"
  yield c.observe.profiler and end > c.run.steps, keys, text


def _attention(c: Config) -> Rules:
  m, latent = c.model, c.model.family.latent_attention
  heads, kv_heads = m.base_num_query_heads, m.base_num_kv_heads
  fix = f"write base_num_kv_heads={_largest_divisor(heads, kv_heads)}"
  text = f"query heads must be a multiple of key/value heads; {fix}"
  yield not latent and heads % kv_heads, "base_num_query_heads base_num_kv_heads", text
  key = "qk_rope_head_dim" if latent else "head_dim"
  channels = flatten(m)[key]
  text = f"rotary embedding pairs channels, so it must be even; write {key}={channels + 1}"
  yield channels % 2, key, text
  for key in ("sliding_window_size", "attn_logits_soft_cap", "query_pre_attn_scalar"):
    text = f"not supported by latent attention; write {key}=0"
    yield latent and flatten(m)[key], f"{key} decoder_block", text
  is_unused = m.rope.local_rope_max_timescale and not m.family.global_layer_every
  text = "this family has no local layers; write local_rope_max_timescale=0"
  yield is_unused, "local_rope_max_timescale decoder_block", text
  key, what = "attn_logits_soft_cap", "a soft cap"
  if m.family.sinks:
    key, what = "decoder_block", "sinks"
  text = f"this backend does not support {what}; write attention=chunked"
  has_either = m.attn_logits_soft_cap or m.family.sinks
  yield m.attention == "dot_product" and has_either, f"attention {key}", text


def _rope(c: Config) -> Rules:
  rope = c.model.rope
  for key in ("mscale", "beta_fast", "rope_truncate"):
    is_set = flatten(rope)[key] != DEFAULTS[key]
    text = f"is only read by yarn; write {key}={show(DEFAULTS[key])}"
    yield rope.rope_type != "yarn" and is_set, f"{key} rope_type", text
  text = "extends nothing; write rope_type=default, or a larger rope_factor"
  yield rope.rope_factor == 1 and rope.rope_type != "default", "rope_factor rope_type", text
  text = "all channels have the same frequency; write rope_max_timescale=10000"
  is_constant = rope.rope_max_timescale == 1 and rope.rope_type == "yarn"
  yield is_constant, "rope_max_timescale rope_type", text


def _layers(c: Config) -> Rules:
  moe, num_layers = c.model.moe, c.model.base_num_decoder_layers
  if not c.model.family.is_moe:
    return
  text = "one expert is a dense model; write decoder_block=llama"
  yield moe.num_experts == 1, "num_experts decoder_block", text
  text = f"there are fewer experts; write num_experts_per_tok={moe.num_experts} or less"
  too_many = moe.num_experts_per_tok > moe.num_experts
  yield too_many, "num_experts_per_tok num_experts", text
  num_dense, step = c.model.layer_plan
  fix = f"write first_num_dense_layers={num_layers - 1} or less, or decoder_block=llama"
  keys = "first_num_dense_layers base_num_decoder_layers"
  yield num_dense >= num_layers, keys, f"leaves no MoE layer; {fix}"
  others = num_layers - num_dense
  fix = f"write interleave_moe_layer_step={_largest_divisor(others, step)}"
  keys = "interleave_moe_layer_step base_num_decoder_layers first_num_dense_layers"
  yield others % step, keys, f"does not divide the {others} other layers; {fix}"


def _router(c: Config) -> Rules:
  moe, num_groups = c.model.moe, c.model.moe.n_routing_groups
  if not c.model.family.is_moe:
    return
  if moe.router in GROUP_ROUTERS:
    divisor = _largest_divisor(moe.num_experts, num_groups)
    text = f"groups must have equal size; write n_routing_groups={divisor}"
    yield moe.num_experts % num_groups, "n_routing_groups num_experts", text
    text = f"there are fewer groups; write topk_routing_group={num_groups} or less"
    yield moe.topk_routing_group > num_groups, "topk_routing_group n_routing_groups", text
    eligible = moe.topk_routing_group * moe.num_experts // num_groups
    fix = f"write num_experts_per_tok={eligible} or less, or a larger topk_routing_group"
    keys = "num_experts_per_tok topk_routing_group n_routing_groups num_experts"
    text = f"the groups of a token hold {eligible} experts; {fix}"
    yield eligible < moe.num_experts_per_tok, keys, text
  text = "its weights always sum to one; write router=topk_softmax or norm_topk_prob=true"
  yield moe.router == "softmax_topk" and not moe.norm_topk_prob, "norm_topk_prob router", text
  grouped = next(iter(GROUP_ROUTERS))
  text = f"this router has no groups; write router={grouped} or n_routing_groups=1"
  yield num_groups > 1 and moe.router not in GROUP_ROUTERS, "n_routing_groups router", text


def _dispatch(c: Config) -> Rules:
  moe = c.model.moe
  if not c.model.family.is_moe:
    return
  for key in ("capacity_factor", "ragged_buffer_factor"):
    text = f"leaves no room for a token; write {key}=1.25, or -1 to drop nothing"
    yield -1 < flatten(moe)[key] <= 0, key, text
  text = "sparse matmuls have no slots; write sparse_matmul=false or capacity_factor=-1"
  yield moe.sparse_matmul and moe.capacity_factor != -1, "capacity_factor sparse_matmul", text
  key = "use_ring_of_experts" if moe.use_ring_of_experts else "sparse_matmul"
  text = "only the ragged all-to-all has that buffer; write ragged_buffer_factor=-1"
  is_ragged = moe.sparse_matmul and not moe.use_ring_of_experts
  yield moe.ragged_buffer_factor != -1 and not is_ragged, f"ragged_buffer_factor {key}", text
  text = "needs sparse matmuls; write sparse_matmul=true or use_ring_of_experts=false"
  keys = "use_ring_of_experts sparse_matmul"
  yield moe.use_ring_of_experts and not moe.sparse_matmul, keys, text
  text = "megablox=false forbids it; write megablox=true or grouped_matmul=auto"
  is_forbidden = moe.grouped_matmul == "megablox" and not moe.megablox
  yield is_forbidden, "grouped_matmul megablox", text
  text = "only sparse matmuls are grouped; write grouped_matmul=auto or sparse_matmul=true"
  is_unused = moe.grouped_matmul != "auto" and not moe.sparse_matmul
  yield is_unused, "grouped_matmul sparse_matmul", text


def _tiles(c: Config) -> Rules:
  for key, tile in flatten(c.model.moe.tiles).items():
    text = f"a tile is [rows, embed, mlp]; write {key}=[512, 1024, 1024], or [] to select it"
    yield len(tile) not in (0, 3), key, text


def _plan(c: Config) -> Rules:
  plan, target = c.plan, c.plan.gpu_target_config
  text = "slices need a topology; write compile_topology=v5p-64 or another"
  is_missing = plan.compile_topology_num_slices > 1 and not plan.compile_topology
  yield is_missing, "compile_topology_num_slices compile_topology", text
  text = "no such file; write gpu_target_config=FILE, or omit it for the estimate only"
  yield target and not _is_file(target), "gpu_target_config", text


def _memory(c: Config) -> Rules:
  names = c.model.mlp_activations
  is_valid = names and names[0] not in _LINEAR and names[1:] in ((), *zip(_LINEAR))
  text = "must be one activation, or one and `linear`; write mlp_activations=[silu, linear]"
  yield not is_valid, "mlp_activations", text
  custom, keys = c.model.remat_policy == "custom", "remat_saved_names remat_policy"
  text = "is only read by a custom policy; write remat_policy=custom"
  yield c.model.remat_saved_names and not custom, keys, text
  text = "a custom policy must save something; write remat_saved_names=[query_proj]"
  yield custom and not c.model.remat_saved_names, keys, text


def _tokenizer(c: Config) -> Rules:
  d, is_byte = c.data, c.data.tokenizer_type == "byte"
  too_small = is_byte and c.model.vocab_size < 258 and d.dataset_type != "synthetic"
  yield too_small, "vocab_size tokenizer_type", "bytes need 258 ids; write vocab_size=258"
  text = "bytes need no file; write tokenizer_type=huggingface or sentencepiece, or no path"
  yield is_byte and d.tokenizer_path, "tokenizer_path tokenizer_type", text
  text = "no such file; write tokenizer_path=FILE or tokenizer_type=byte"
  is_missing = not is_byte and not _is_file(d.tokenizer_path)
  yield is_missing, "tokenizer_path tokenizer_type", text


def _chat(c: Config) -> Rules:
  d, is_chat = c.data, c.data.dataset_type == "chat"
  text = "no such file; write chat_template_path=FILE, a Jinja2 template"
  yield d.chat_template_path and not _is_file(d.chat_template_path), "chat_template_path", text
  text = "only conversations can have a row each; write packing=true"
  yield not is_chat and not d.packing, "packing dataset_type", text
  text = "chat needs control tokens; write tokenizer_type=huggingface, with tokenizer.json"
  is_sentencepiece = d.tokenizer_type == "sentencepiece"
  yield is_chat and is_sentencepiece, "tokenizer_type dataset_type", text
  text = "bytes have no chat template; write chat_template_path=configs/chat/plain.jinja"
  is_byte = d.tokenizer_type == "byte"
  yield is_chat and is_byte and not d.chat_template_path, "dataset_type tokenizer_type", text


def _batches(c: Config) -> Rules:
  d = c.data
  needs_column = d.dataset_type in ("jsonl", "parquet")
  text = "is empty; write text_column=text"
  yield needs_column and not d.text_column, "text_column dataset_type", text
  text = "a step needs rows; write per_device_batch_size=1, or a fraction of it"
  yield d.per_device_batch_size <= 0, "per_device_batch_size", text
  ordered, fix = not d.enable_data_shuffling, "write enable_data_shuffling=true"
  keys = "data_sampling enable_data_shuffling"
  yield ordered and d.data_sampling == "bootstrap", keys, f"draws rows at random; {fix}"
  keys, text = "ensemble_data enable_data_shuffling", f"members would read the same order; {fix}"
  yield ordered and c.ensemble.ensemble_data != "shared", keys, text


def _ensemble(c: Config) -> Rules:
  e = c.ensemble
  for key, value in flatten(e).items():
    text = f"there is no ensemble; write members or sweep, or {key}={show(DEFAULTS[key])}"
    yield not e.members and not e.sweep and value != DEFAULTS[key], key, text
  for key in ("ensemble_executor", "ensemble_num_workers"):
    is_unused = e.ensemble_strategy not in ("auto", "processes")
    text = "this strategy starts no processes; write ensemble_strategy=processes"
    yield is_unused and flatten(e)[key] != DEFAULTS[key], f"{key} ensemble_strategy", text
  factor, steps = e.asha_reduction_factor, c.run.steps
  text = "would stop no member; write asha_reduction_factor=2 or more, or 0 for no early stopping"
  yield factor == 1, "asha_reduction_factor", text
  text = f"the run ends before that rung; write asha_min_steps={max(steps // 4, 1)}"
  yield factor > 1 and e.asha_min_steps >= steps, "asha_min_steps steps", text


def _optimizer(c: Config) -> Rules:
  o = c.optimizer
  text = "has no length; write 1 or more, or learning_rate_schedule_steps=-1 for all steps"
  yield o.learning_rate_schedule_steps == 0, "learning_rate_schedule_steps", text
  overlaps = o.warmup_steps_fraction + o.wsd_decay_steps_fraction > 1
  rest = round(1 - o.warmup_steps_fraction, 6)
  text = f"warm-up and decay overlap; write wsd_decay_steps_fraction={rest} or less"
  keys = "warmup_steps_fraction wsd_decay_steps_fraction"
  yield o.lr_schedule_type == "wsd" and overlaps, keys, text
  for key in ("adam_b1", "adam_b2", "muon_beta"):
    yield flatten(o)[key] == 1, key, f"would never change; write {key}={DEFAULTS[key]}"
  text = "the average would never change; write ema_decay=0.999, or 0"
  yield c.training.ema_decay == 1, "ema_decay", text
  text = f"divides by zero where a gradient is zero; write adam_eps={DEFAULTS['adam_eps']}"
  yield o.opt_type == "adamw" and o.adam_eps == 0, "adam_eps", text


def _phases(c: Config) -> Rules:
  p = c.phasing
  text = "there are no phases; write phases, or no initial_phases"
  yield p.initial_phases and not p.phases, "initial_phases phases", text
  for key in ("members", "sweep"):
    text = "a member's phases are one program; write phase_strategy=auto or switch"
    is_separate = p.phase_strategy == "separate"
    yield is_separate and flatten(c.ensemble)[key], f"phase_strategy {key}", text
  num_heads, length = c.model.num_draft_heads, c.data.max_target_length
  are_trained = any(phase.get("loss") in DRAFT_LOSSES for phase in p.phases)
  text = "no phase trains them; write phases with loss: match_head, or num_draft_heads=0"
  yield num_heads and not are_trained, "num_draft_heads", text
  text = f"rows are shorter; write num_draft_heads={min(3, length - 1)}"
  yield num_heads >= length, "num_draft_heads max_target_length", text


def _degrees(c: Config) -> Rules:
  degree = flatten(c.mesh)
  for group in ("ici", "dcn"):
    keys = [f"{group}_{mesh_axis}_parallelism" for mesh_axis in MESH_AXES]
    for key in keys:
      yield degree[key] == 0, key, f"an axis needs at least 1 shard; write {key}=1"
    free = [key for key in keys if degree[key] == -1]
    first = min(free, key=lambda key: DEFAULTS[key], default="")
    text = f"only one axis per group can take the remaining devices; write {first}=1"
    yield len(free) > 1, " ".join(free), text


def _axis_rules(c: Config) -> Rules:
  seen: set[str] = set()
  for name, mesh_axes in c.mesh.logical_axis_rules:
    for mesh_axis in mesh_axes:
      hint = did_you_mean(mesh_axis, MESH_AXES) or f"choose from {', '.join(MESH_AXES)}"
      text = f"{mesh_axis} is not a mesh axis; {hint}"
      yield mesh_axis not in MESH_AXES, "logical_axis_rules", text
    text = f"write {name} once, and each mesh axis once in it"
    yield len(set(mesh_axes)) < len(mesh_axes) or name in seen, "logical_axis_rules", text
    seen.add(name)


def _divisibility(c: Config) -> Rules:
  """Known degrees must divide the dimensions that the default sharding table maps to them."""
  if c.mesh.logical_axis_rules:  # checked against the mesh when it is built
    return
  m, family = c.model, c.model.family
  has_dense_layers = not family.is_moe or c.model.layer_plan != (0, 1)
  sharded = {
    "base_num_query_heads": ("tensor",),
    "base_num_kv_heads": () if family.latent_attention else ("tensor",),
    "base_moe_mlp_dim": ("tensor",) if family.is_moe else (),
    "base_mlp_dim": ("tensor",) if has_dense_layers else (),
    "base_emb_dim": ("tensor",) if m.num_draft_heads else (),
    "vocab_size": ("tensor",),
    "max_target_length": ("context",),
    "num_experts": ("expert",) if family.is_moe else (),
  }
  latents = ("q_lora_rank", "kv_lora_rank") if family.latent_attention else ()
  by_fsdp = dict.fromkeys(("base_emb_dim", *latents), ("fsdp", "context", "expert"))
  values = flatten(c)
  for key, mesh_axes in (*sharded.items(), *by_fsdp.items()):
    degrees = [f"{group}_{axis}_parallelism" for group in ("ici", "dcn") for axis in mesh_axes]
    used = [name for name in degrees if values[name] > 1]
    size, shards = values[key], prod(values[name] for name in used)
    divisor = _largest_divisor(size, shards) if size else 0
    fix = f"write degrees that make {divisor}, or another {key}"
    yield size % shards, " ".join([*used, key]), f"{shards} shards do not divide {size}; {fix}"


def _local_checkpoints(c: Config) -> Rules:
  k, key = c.checkpoint, "local_checkpoint_directory"
  if not k.local_checkpoint_directory:
    text = f"replicas need a folder; write {key}=/dev/shm/maxlite"
    yield k.local_checkpoint_replication, f"local_checkpoint_replication {key}", text
    return
  text = "they are saved between shared ones; write enable_checkpointing=true"
  yield not k.enable_checkpointing, f"{key} enable_checkpointing", text
  for ensemble_key in ("members", "sweep"):
    text = f"an ensemble has no local checkpoints; write {key}="
    yield flatten(c.ensemble)[ensemble_key], f"{key} {ensemble_key}", text
  text = f"none would be saved; write local_checkpoint_period={max(k.checkpoint_period // 10, 1)}"
  if k.checkpoint_period == 1:
    text = f"a shared one is saved at every step; write {key}="
  is_rarer = k.local_checkpoint_period >= k.checkpoint_period
  yield is_rarer, "local_checkpoint_period checkpoint_period", text


def _datasets(c: Config) -> Rules:
  d = c.data
  if d.dataset_type == "synthetic":
    return
  yield not d.dataset_path, "dataset_path", "has no data; write dataset_path=FILE or [stdlib]"
  for key in ("dataset_path", "eval_dataset_path"):
    for entry in flatten(d)[key]:
      is_stdlib, path = entry == "stdlib", os.path.expanduser(entry)
      text = f"stdlib is text; write {key}=FILE"
      yield is_stdlib and d.dataset_type != "text", f"{key} dataset_type", text
      exists = is_stdlib or os.path.exists(path) or glob.glob(path, recursive=True)
      fix = f"write {key}=FILE, a folder or a glob that matches"
      yield not exists, key, f"{entry} matches no file; {fix}"


def _evaluation(c: Config) -> Rules:
  text = "evaluates nothing; write 1 or more, or eval_steps=-1 for all"
  yield c.observe.eval_steps == 0, "eval_steps", text


RULES: tuple[Callable[[Config], Rules], ...] = (
  *(_run, _attention, _rope, _layers, _router, _dispatch, _tiles, _plan, _memory),
  *(_tokenizer, _chat, _batches, _ensemble, _optimizer, _phases),
  *(_degrees, _axis_rules, _divisibility, _local_checkpoints),
)
DATA_RULES = (_datasets, _evaluation)  # of commands that read data


def validate(config: Config, source: Mapping[str, str], *, needs_data: bool) -> None:
  """Raise an error for the first rule that is violated.

  Args:
    source: where each key that is not at its default was set.
    needs_data: whether data files must exist.

  Raises:
    UserError: one line with the keys, their values and sources, the rule and the fix.
  """
  for rules in RULES + DATA_RULES if needs_data else RULES:
    for violated, keys, text in rules(config):
      if violated:
        raise UserError(f"{_describe(keys.split(), flatten(config), source)}: {text}")


def _describe(keys: list[str], values: Mapping[str, object], source: Mapping[str, str]) -> str:
  """`SOURCE: key=value with key=value (its source, if it is another)`."""
  sources = [source.get(key, DEFAULT) for key in keys]
  first = next((s for s in sources if s not in (DEFAULT, SHARED)), sources[0])
  shown = [
    f"{key}={show(values[key])}" + (f" ({s})" if s != first else "")
    for key, s in zip(keys, sources, strict=True)
  ]
  return f"{first}: {' with '.join(shown)}"
