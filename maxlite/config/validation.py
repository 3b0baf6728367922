"""Validate a config: the rules between keys that need no devices; rules.py has their form."""

import os
from collections.abc import Callable, Mapping
from math import lcm, prod

from maxlite.config.data_files import (
  other_dataset_type,
  template_fix,
  tokenizer_fix,
)
from maxlite.config.errors import UserError
from maxlite.config.file_io import expand_glob
from maxlite.config.moe_rules import MOE_RULES
from maxlite.config.raw_values import show
from maxlite.config.registry import DRAFT_LOSSES, PARTIAL_ATTENTION_BACKENDS
from maxlite.config.rules import (
  ENSEMBLE_KEYS,
  Rules,
  Values,
  ensemble,
  generation,
  largest_divisor,
  local_updates,
  population,
  search,
  teacher,
)
from maxlite.config.schema import DEFAULTS, MESH_AXES, Config, TilesConfig, flatten
from maxlite.config.values import SECRETS, show_key, suggest
from maxlite.config.yaml_files import CONFIGS

# Sources that are not at fault: defaults are consistent, and so are the keys that members share.
DEFAULT, SHARED = "default", "shared"
MAX_NAME_BYTES = 255  # of a file's name, on all usual file systems
_PATH_ENDINGS = ("_path", "_directory", "_dir", "_file", "save_hlo", "gpu_target_config")
_HUB_KEYS = ("dataset_path", "eval_dataset_path", "tokenizer_path")
_STORE_KEYS = ("base_output_directory", "token_cache_directory", "output_path", "jax_cache_dir")
PATH_KEYS = tuple(key for key in DEFAULTS if key.endswith(_PATH_ENDINGS))
SCHEDULE_KEYS = ("batch_size_schedule", "sequence_length_schedule")
_LINEAR = ("linear", "linear_plus_one")


def is_folder_name(name: str) -> bool:
  """Whether `name` is the name of one folder, as needed for a run or a member."""
  is_valid = bool(name) and name.isprintable() and name[0] != "." and not set(name) & set("/\\")
  return is_valid and len(name.encode()) <= MAX_NAME_BYTES


def is_header_text(secret: str) -> bool:
  """Whether an HTTP header can hold `secret` as one word: visible ASCII without spaces."""
  return all("!" <= character <= "~" for character in secret)


def _is_file(path: str) -> bool:
  return "://" in path or os.path.isfile(os.path.expanduser(path))


def _paths(v: Values) -> Rules:
  for key in PATH_KEYS:
    value = vars(v)[key]
    for path in value if isinstance(value, tuple) else (value,):
      expanded = os.path.expanduser(path)
      user = expanded.partition("/")[0]
      yield user.startswith("~"), key, f"there is no user {user[1:]}; write a path without ~"
      names = expanded.encode(errors="surrogatepass").split(b"/")
      is_valid = len(expanded) < 4096 and max(map(len, names)) <= MAX_NAME_BYTES
      text = f"is too long ({MAX_NAME_BYTES} bytes per name, 4096 in all) or has a NUL character"
      yield not is_valid or "\0" in path, key, f"{text}; write another path"
      scheme, is_uri, _ = path.partition("://")
      kinds = ["s3", "gs"] if key in (*_HUB_KEYS, *_STORE_KEYS) else []
      kinds += ["hf"] if key in _HUB_KEYS else []
      fix = f"write a path on this machine{''.join(f', or {kind}://' for kind in kinds)}"
      yield is_uri and scheme not in kinds, key, f"cannot be on {scheme}://; {fix}"


def _secrets(v: Values) -> Rules:
  for key in SECRETS:
    secret = vars(v)[key]
    text = "has a character that HTTP headers cannot have; write visible ASCII without spaces"
    yield not is_header_text(secret), key, text


def _held_out(v: Values) -> Rules:
  text = "evaluates nothing; write 1 or more, or eval_steps=-1 for all"
  yield v.eval_steps == 0, "eval_steps", text
  is_single = v.eval_interval < 1
  text = "there is one evaluation, at the end; write eval_interval=100"
  yield v.early_stopping_patience and is_single, "early_stopping_patience eval_interval", text
  keys = "keep_best_checkpoint enable_checkpointing"
  text = "nothing is saved; write enable_checkpointing=true"
  yield v.keep_best_checkpoint and not v.enable_checkpointing, keys, text
  for key in ("callbacks", "early_stopping_patience", "keep_best_checkpoint"):
    text = f"not supported by ensembles; write {key}={show(DEFAULTS[key])}"
    yield vars(v)[key] and v.ensemble_key, key, text


def _run(v: Values) -> Rules:
  fix = "write run_name=NAME of up to 255 bytes without slashes or a leading dot"
  yield not is_folder_name(v.run_name), "run_name", f"must name one folder; {fix}"
  end = v.skip_first_n_steps_for_profiler + v.profiler_steps
  keys = "profiler skip_first_n_steps_for_profiler profiler_steps steps"
  text = f"the trace ends after the run; write steps={end} or more"
  yield v.profiler and end > v.steps, keys, text


def _attention(v: Values) -> Rules:
  latent = v.family.latent_attention
  heads = v.base_num_query_heads
  sinks = v.family.sinks
  fix = f"write base_num_kv_heads={largest_divisor(heads, v.base_num_kv_heads)}"
  text = f"query heads must be a multiple of key/value heads; {fix}"
  yield not latent and heads % v.base_num_kv_heads, "base_num_query_heads base_num_kv_heads", text
  key = "qk_rope_head_dim" if latent else "head_dim"
  num_channels = vars(v)[key]
  text = f"rotary embedding pairs channels, so it must be even; write {key}={num_channels + 1}"
  yield num_channels % 2, key, text
  rotated = int(num_channels * v.partial_rotary_factor)
  text = f"rotates {rotated} channels, but needs a positive even number; write 1"
  yield rotated % 2 or not rotated, f"partial_rotary_factor {key}", text
  text = "not supported by latent attention, where qk_rope_head_dim rotate; write 1"
  yield latent and v.partial_rotary_factor != 1, "partial_rotary_factor decoder_block", text
  for key in ("sliding_window_size", "attn_logits_soft_cap", "query_pre_attn_scalar"):
    text = f"not supported by latent attention; write {key}=0"
    yield latent and vars(v)[key], f"{key} decoder_block", text
  is_unused = v.local_rope_max_timescale and not v.family.global_layer_every
  text = "this family has no local layers; write local_rope_max_timescale=0"
  yield is_unused, "local_rope_max_timescale decoder_block", text
  if sinks:
    key = "decoder_block"
    what = "sinks"
  else:
    key = "attn_logits_soft_cap"
    what = "a soft cap"
  text = f"this backend does not support {what}; write attention=chunked"
  yield v.attention == "dot_product" and (v.attn_logits_soft_cap or sinks), f"attention {key}", text


def _rope(v: Values) -> Rules:
  for key in ("mscale", "beta_fast", "rope_truncate"):
    text = f"is only read by yarn; write {key}={show(DEFAULTS[key])}"
    yield v.rope_type != "yarn" and vars(v)[key] != DEFAULTS[key], f"{key} rope_type", text
  text = "extends nothing; write rope_type=default, or a larger rope_factor"
  yield v.rope_factor == 1 and v.rope_type != "default", "rope_factor rope_type", text
  text = "all channels have the same frequency; write rope_max_timescale=10000"
  yield v.rope_max_timescale == 1 and v.rope_type == "yarn", "rope_max_timescale rope_type", text


def _hardware(v: Values) -> Rules:
  for key in flatten(TilesConfig()):
    text = f"a tile is [rows, embed, mlp]; write {key}=[512, 1024, 1024], or [] to select it"
    yield len(vars(v)[key]) not in (0, 3), key, text
  text = "slices need a topology; write compile_topology=v5p-64 or another"
  is_missing = v.compile_topology_num_slices > 1 and not v.compile_topology
  yield is_missing, "compile_topology_num_slices compile_topology", text
  text = "no such file; write gpu_target_config=FILE, or omit it for the estimate only"
  yield v.gpu_target_config and not _is_file(v.gpu_target_config), "gpu_target_config", text


def _memory(v: Values) -> Rules:
  first = v.mlp_activations[:1]
  others = v.mlp_activations[1:]
  is_valid = first and first[0] not in _LINEAR and others in ((), *zip(_LINEAR))
  text = "must be one activation, or one and `linear`; write mlp_activations=[silu, linear]"
  yield not is_valid, "mlp_activations", text
  is_custom = v.remat_policy == "custom"
  keys = "remat_saved_names remat_policy"
  text = "is only read by a custom policy; write remat_policy=custom"
  yield v.remat_saved_names and not is_custom, keys, text
  text = "a custom policy must save something; write remat_saved_names=[query_proj]"
  yield is_custom and not v.remat_saved_names, keys, text


def _tokenizer(v: Values) -> Rules:
  is_byte = v.tokenizer_type == "byte"
  too_small = is_byte and v.vocab_size < 258 and v.dataset_type != "synthetic"
  yield too_small, "vocab_size tokenizer_type", "bytes need 258 ids; write vocab_size=258"
  keys = "tokenizer_path tokenizer_type"
  is_file = _is_file(v.tokenizer_path)
  text = "bytes need no file; write tokenizer_type=huggingface or sentencepiece, or no path"
  yield is_byte and is_file, keys, text
  needs_file = v.tokenizer_path or not is_byte
  yield needs_file and not is_file, keys, tokenizer_fix(v.tokenizer_path)


def _chat(v: Values) -> Rules:
  template = v.chat_template_path
  is_chat = v.dataset_type == "chat"
  text = template_fix(template, CONFIGS.parent)
  yield template and not _is_file(template), "chat_template_path", text
  text = "only conversations can have a row each; write packing=true"
  yield not is_chat and not v.packing, "packing dataset_type", text
  text = "chat needs control tokens; write tokenizer_type=huggingface, with tokenizer.json"
  yield is_chat and v.tokenizer_type == "sentencepiece", "tokenizer_type dataset_type", text
  text = f"bytes have no chat template; write chat_template_path={_plain_template()}"
  is_missing = v.tokenizer_type == "byte" and not template
  yield is_chat and is_missing, "dataset_type tokenizer_type", text


def _plain_template() -> str:
  """The path of a chat template that is shipped: relative in a clone, absolute elsewhere."""
  file = CONFIGS / "chat" / "plain.jinja"
  if file.is_relative_to(os.getcwd()):
    file = file.relative_to(os.getcwd())
  return str(file)


def _batches(v: Values) -> Rules:
  needs_column = v.dataset_type in ("jsonl", "parquet", "arrow", "array_record")
  text = "is empty; write text_column=text"
  yield needs_column and not v.text_column, "text_column dataset_type", text
  keys = "eval_dataset_path dataset_mixture"
  text = "write eval_path in the sources of the mixture"
  yield v.eval_dataset_path and v.dataset_mixture, keys, text
  text = "a step needs rows; write per_device_batch_size=1, or a fraction of it"
  yield v.per_device_batch_size <= 0, "per_device_batch_size", text
  is_ordered = not v.enable_data_shuffling
  fix = "write enable_data_shuffling=true"
  keys = "data_sampling enable_data_shuffling"
  text = f"draws rows at random; {fix}"
  yield is_ordered and v.data_sampling == "bootstrap", keys, text
  keys = "ensemble_data enable_data_shuffling"
  text = f"members would read the same order; {fix}"
  yield is_ordered and v.ensemble_data != "shared", keys, text


def _schedules(v: Values) -> Rules:
  for key in SCHEDULE_KEYS:
    entries = vars(v)[key]
    starts = [start for start, _ in entries]
    text = f"steps must ascend from 0; write {key}=[[0, 8], [1000, 16]]"
    yield entries and (starts[0] != 0 or sorted(set(starts)) != starts), key, text
    yield any(value < 1 for _, value in entries), key, "a step needs tokens; write 1 or more"
    other = "phases" if v.phases else v.ensemble_key
    text = f"{other} have batches of one shape; write {key}=[]"
    yield entries and other, f"{key} {other}", text
  keys = "batch_size_schedule global_batch_size"
  text = "the schedule replaces the size; write global_batch_size=0"
  yield v.batch_size_schedule and v.global_batch_size, keys, text
  for _, length in v.sequence_length_schedule:
    fix = f"write {largest_divisor(v.max_target_length, max(length, 1))}"
    keys = "sequence_length_schedule max_target_length"
    yield length > 0 and v.max_target_length % length, keys, f"{length} is not a divisor; {fix}"


def _optimizer(v: Values) -> Rules:
  text = "has no length; write 1 or more, or learning_rate_schedule_steps=-1 for all steps"
  yield v.learning_rate_schedule_steps == 0, "learning_rate_schedule_steps", text
  overlaps = v.warmup_steps_fraction + v.wsd_decay_steps_fraction > 1
  fix = f"write wsd_decay_steps_fraction={round(1 - v.warmup_steps_fraction, 6)} or less"
  keys = "warmup_steps_fraction wsd_decay_steps_fraction"
  text = f"warm-up and decay overlap; {fix}"
  yield v.lr_schedule_type == "wsd" and overlaps, keys, text
  for key in ("adam_b1", "adam_b2", "muon_beta"):
    yield vars(v)[key] == 1, key, f"would never change; write {key}={DEFAULTS[key]}"
  text = "the average would never change; write ema_decay=0.999, or 0"
  yield v.ema_decay == 1, "ema_decay", text
  text = f"divides by zero where a gradient is zero; write adam_eps={DEFAULTS['adam_eps']}"
  yield v.opt_type == "adamw" and v.adam_eps == 0, "adam_eps", text


def _parametrization(v: Values) -> Rules:
  is_mup = v.parametrization == "mup"
  base = "mup_base_emb_dim"
  key = "parametrization"
  text = f"needs the width at which rates were tuned; write {base}=64, or parametrization=standard"
  yield is_mup and not vars(v)[base], f"{key} {base}", text
  for name in (base, "mup_base_head_dim"):
    text = f"is only read by mup; write parametrization=mup, or {name}=0"
    yield not is_mup and vars(v)[name], f"{name} {key}", text
  text = "mup has no rule for adapters; write parametrization=standard"
  yield is_mup and v.lora_rank, f"{key} lora_rank", text
  text = "its updates follow the size of the weights; write opt_type=adamw, lion or muon"
  yield is_mup and v.opt_type == "adafactor", f"opt_type {key}", text
  text = "mup has no rule for this family's embedding and norms; write parametrization=standard"
  is_gemma = v.family.scaled_embedding or v.family.zero_centred_norms
  yield is_mup and is_gemma, f"{key} decoder_block", text
  text = "attention scores have another scale; write mup_base_head_dim=0"
  is_fixed = v.query_pre_attn_scalar or v.family.latent_attention
  yield v.mup_base_head_dim and is_fixed, "mup_base_head_dim decoder_block", text


def _phases(v: Values) -> Rules:
  text = "there are no phases; write phases, or no initial_phases"
  yield v.initial_phases and not v.phases, "initial_phases phases", text
  text = "a member's phases are one program; write phase_strategy=auto or switch"
  yield v.phase_strategy == "separate" and v.ensemble_key, f"phase_strategy {v.ensemble_key}", text
  are_trained = any(phase.get("loss") in DRAFT_LOSSES for phase in v.phases)
  text = "no phase trains them; write phases with loss: match_head, or num_draft_heads=0"
  yield v.num_draft_heads and not are_trained, "num_draft_heads", text
  text = f"rows are shorter; write num_draft_heads={min(3, v.max_target_length - 1)}"
  yield v.num_draft_heads >= v.max_target_length, "num_draft_heads max_target_length", text


def _degrees(v: Values) -> Rules:
  for group in ("ici", "dcn"):
    keys = [f"{group}_{mesh_axis}_parallelism" for mesh_axis in MESH_AXES]
    for key in keys:
      yield vars(v)[key] == 0, key, f"an axis needs at least 1 shard; write {key}=1"
    free = [key for key in keys if vars(v)[key] == -1]
    first = min(free, key=DEFAULTS.__getitem__, default="")
    text = f"only one axis per group can take the remaining devices; write {first}=1"
    yield len(free) > 1, " ".join(free), text


def _axis_rules(v: Values) -> Rules:
  seen: set[str] = set()
  for name, mesh_axes in v.logical_axis_rules:
    for axis in mesh_axes:
      text = f"{axis} is not a mesh axis; {suggest(axis, MESH_AXES)}"
      yield axis not in MESH_AXES, "logical_axis_rules", text
    text = f"write {name} once, and each mesh axis once in it"
    yield len(set(mesh_axes)) < len(mesh_axes) or name in seen, "logical_axis_rules", text
    seen.add(name)


def _divisibility(v: Values) -> Rules:
  """Known degrees must divide the dimensions that the default sharding table maps to them."""
  if v.logical_axis_rules:  # checked against the mesh when it is built
    return
  is_moe = v.family.is_moe
  latent = v.family.latent_attention
  has_dense = not is_moe or v.first_num_dense_layers or v.interleave_moe_layer_step > 1
  by_fsdp = ("base_emb_dim", *(("q_lora_rank", "kv_lora_rank") if latent else ()))
  sharded = (
    ("base_num_query_heads", "tensor"),
    ("base_num_kv_heads", "" if latent else "tensor"),
    ("base_moe_mlp_dim", "tensor" if is_moe else ""),
    ("base_mlp_dim", "tensor" if has_dense else ""),
    ("base_emb_dim", "tensor" if v.num_draft_heads else ""),
    ("vocab_size", "tensor"),
    ("max_target_length", "context"),
    ("num_experts", "expert" if is_moe else ""),
    *((key, "fsdp context expert") for key in by_fsdp),
  )
  for key, axes in sharded:
    degrees = [f"{group}_{axis}_parallelism" for group in ("ici", "dcn") for axis in axes.split()]
    used = [degree for degree in degrees if vars(v)[degree] > 1]
    size = vars(v)[key]
    shards = prod(vars(v)[degree] for degree in used)
    divisor = largest_divisor(size, shards) if size else 0
    fix = f"write degrees that make {divisor}, or another {key}"
    yield size % shards, " ".join([*used, key]), f"{shards} shards do not divide {size}; {fix}"


def _context_parallelism(v: Values) -> Rules:
  """The strategy must fit the backend, and known degrees the positions and the heads."""
  strategy = v.context_parallel_strategy
  key = "context_parallel_strategy"
  context, tensor = (
    prod(max(vars(v)[f"{group}_{axis}_parallelism"], 1) for group in ("ici", "dcn"))
    for axis in ("context", "tensor")
  )
  if strategy == "all_gather" or context == 1 or v.logical_axis_rules:
    return
  if strategy == "ring":
    text = "the backend cannot merge results of several shards' keys; write attention=chunked"
    yield v.attention not in ("auto", *PARTIAL_ATTENTION_BACKENDS), f"{key} attention", text
    length = -(-v.max_target_length // (2 * context)) * 2 * context
    text = f"each of {context} shards must have an even number; write max_target_length={length}"
    yield v.max_target_length % (2 * context), f"{key} max_target_length", text
    for _, length in v.sequence_length_schedule:
      text = f"each of {context} shards must have an even number; write multiples of {2 * context}"
      yield length % (2 * context), f"sequence_length_schedule {key}", text
    return
  num_heads = v.base_num_query_heads // tensor
  num_groups = v.base_num_kv_heads // tensor
  num_groups = num_heads if v.family.latent_attention else max(num_groups, 1)
  text = f"{context} shards do not divide {num_heads} heads per tensor shard; write {key}=ring"
  yield num_heads % lcm(num_groups, context), f"{key} base_num_query_heads", text


def _local_checkpoints(v: Values) -> Rules:
  key = "local_checkpoint_directory"
  if not v.local_checkpoint_directory:
    text = f"replicas need a folder; write {key}=/dev/shm/maxlite"
    yield v.local_checkpoint_replication, f"local_checkpoint_replication {key}", text
    return
  text = "they are saved between shared ones; write enable_checkpointing=true"
  yield not v.enable_checkpointing, f"{key} enable_checkpointing", text
  text = f"an ensemble has no local checkpoints; write {key}="
  yield v.ensemble_key, f"{key} {v.ensemble_key}", text
  text = f"none would be saved; write local_checkpoint_period={max(v.checkpoint_period // 10, 1)}"
  if v.checkpoint_period == 1:
    text = f"a shared one is saved at every step; write {key}="
  is_rarer = v.local_checkpoint_period >= v.checkpoint_period
  yield is_rarer, "local_checkpoint_period checkpoint_period", text


def _data_files(v: Values) -> Rules:
  if v.dataset_type == "synthetic" or v.dataset_mixture:  # whose sources are validated one by one
    return
  yield not v.dataset_path, "dataset_path", "has no data; write dataset_path=FILE or [stdlib]"
  for key in ("dataset_path", "eval_dataset_path"):
    for entry in vars(v)[key]:
      is_stdlib = entry == "stdlib"
      path = os.path.expanduser(entry)
      text = f"stdlib is text; write {key}=FILE"
      yield is_stdlib and v.dataset_type != "text", f"{key} dataset_type", text
      is_uri = "://" in entry  # looked up when it is opened
      exists = is_stdlib or is_uri or os.path.exists(path) or any(expand_glob(path))
      fix = f"write {key}=FILE, a folder or a glob that matches"
      yield not exists, key, f"{entry} matches no file; {fix}"
      other = "" if os.path.isdir(path) else other_dataset_type(entry, v.dataset_type)
      yield other, f"{key} dataset_type", f"{entry} is of another type; write dataset_type={other}"


RULES: tuple[Callable[[Values], Rules], ...] = (
  *(_paths, _secrets, _run, _held_out, _attention, _rope, _hardware, _memory, _tokenizer),
  *(_chat, _batches, _schedules, ensemble, population, local_updates, _optimizer),
  *(search, _parametrization, _phases, teacher, generation),
  *(_degrees, _axis_rules, _divisibility, _context_parallelism, _local_checkpoints),
)


def validate(config: Config, source: Mapping[str, str], *, needs_data: bool) -> None:
  """Raise an error for the first rule that is violated.

  Args:
    source: where each key that is not at its default was set.
    needs_data: whether data files must exist.

  Raises:
    UserError: one line with the keys, their values and sources, the rule and the fix.
  """
  values = flatten(config)
  family = config.model.family
  all_rules = RULES + (MOE_RULES if family.is_moe else ()) + ((_data_files,) if needs_data else ())
  ensemble_key = next((key for key in ENSEMBLE_KEYS if values[key]), "")
  for rules in all_rules:
    for violated, keys, text in rules(Values(**values, family=family, ensemble_key=ensemble_key)):
      if violated:
        raise UserError(f"{_describe(keys.split(), values, source)}: {text}")


def _describe(keys: list[str], values: Mapping[str, object], source: Mapping[str, str]) -> str:
  """`SOURCE: key=value with key=value (its source, if it is another)`."""
  sources = [source.get(key, DEFAULT) for key in keys]
  first = next((s for s in sources if s not in (DEFAULT, SHARED)), sources[0])
  shown = [
    show_key(key, values[key]) + (f" ({s})" if s != first else "")
    for key, s in zip(keys, sources, strict=True)
  ]
  return f"{first}: {' with '.join(shown)}"
