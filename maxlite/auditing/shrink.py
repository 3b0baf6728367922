"""Shrinks the step of a config to a tiny one of the same structure, in float64.

Layers of every kind, the router, adapters, objectives and optimizers stay; widths, counts and
lengths become as small as the meshes of eight devices allow. What cannot stay is told in a note.
"""

import dataclasses
import math
from typing import NamedTuple

from maxlite.config.schema import (
  CycleConfig,
  DataConfig,
  GatedDeltaConfig,
  LatentAttentionConfig,
  LocalUpdatesConfig,
  MambaConfig,
  ModelConfig,
  MoeConfig,
  OptimizerConfig,
  RopeConfig,
  TrainingConfig,
)
from maxlite.registry import TAUGHT_LOSSES, has_reference
from maxlite.training.spec import StepSpec

ROWS = 24  # divide by all meshes of eight devices, and by three micro-batches
LENGTH = 16  # divides by the 2 x 8 parts of ring attention on eight shards
VOCAB = 32
WIDTH = 16
# Adam divides by |gradient| + eps: with a smaller one, the rounding of a gradient that is nearly
# zero would be a large difference of the update.
ADAM_EPS = 1e-3
QK_CLIP = 1e-3  # a threshold that the logits of tiny models exceed
SCHEDULE_STEPS = 20  # short, so that the second step has no tiny learning rate of a warm-up


class Shrunk(NamedTuple):
  """A tiny step."""

  spec: StepSpec
  notes: list[str]  # what of the config it does not have


def shrink(spec: StepSpec) -> Shrunk:
  """The tiny step of the structure of `spec`, and notes on what it leaves out."""
  notes = []
  model = spec.model
  moe = model.moe
  if model.quantization:
    notes.append(
      f"quantization={model.quantization}: rounding is not continuous, so that only gradients on "
      "one device are compared with those of the model without it"
    )
  if model.family.is_moe and moe.drops_overflow:
    notes.append("ragged_overflow=drop: what is dropped depends on the mesh; nothing is here")
  if spec.local_updates.diloco_sync_period:
    notes.append(
      "diloco_sync_period: replicas train on other rows; only their outer step is audited"
    )
  if spec.training.deterministic_reductions:
    notes.append("deterministic_reductions: audited without")

  data = dataclasses.replace(DataConfig(), max_target_length=LENGTH, global_batch_size=ROWS)
  objectives = []
  for objective in spec.objectives:
    if objective.loss in TAUGHT_LOSSES:
      notes.append(f"loss {objective.loss} of {objective.name}: with two random teachers")
    if has_reference(objective.loss, spec.training.grpo_beta) and spec.training.reference_path:
      notes.append(f"loss {objective.loss} of {objective.name}: with a random reference")
    objectives.append(
      dataclasses.replace(
        objective,
        optimizer=_optimizer(objective.optimizer),
        batches=data,
        gradient_accumulation_steps=1,
      )
    )
  shrunk = dataclasses.replace(
    spec,
    mesh=dataclasses.replace(spec.mesh, sharding_tolerance=1.0),
    model=shrink_model(model),
    training=_training(spec.training),
    batches=data,
    objectives=tuple(objectives),
    evaluates_pairs=False,
    local_updates=LocalUpdatesConfig(),
    compiler_options=type(spec.compiler_options)(),
  )
  return Shrunk(shrunk, notes)


def shrink_model(model: ModelConfig) -> ModelConfig:
  """The tiny model with layers of every kind of `model`."""
  num_kv_heads = _small(model.base_num_kv_heads)
  ratio = min(model.base_num_query_heads // model.base_num_kv_heads, 3)
  num_heads = num_kv_heads * max(ratio, 1)
  if model.family.reads("mla"):
    num_heads = num_kv_heads = _small(model.base_num_query_heads)
  head_dim = _head_dim(model)
  interval = min(model.inhomogeneous_layer_cycle_interval, 2)
  cycle = _cycle(model.cycle, interval, head_dim)
  num_layers, moe = _layers(model, interval, cycle.num_kv_shared_layers)
  scaling = model.scaling
  if scaling.parametrization == "mup":
    base_head_dim = head_dim if scaling.mup_base_head_dim else 0
    scaling = dataclasses.replace(
      scaling, mup_base_emb_dim=WIDTH // 2, mup_base_head_dim=base_head_dim
    )
  return dataclasses.replace(
    model,
    dtype="float64",
    weight_dtype="float64",
    vocab_size=VOCAB,
    base_emb_dim=WIDTH,
    base_num_decoder_layers=num_layers,
    inhomogeneous_layer_cycle_interval=interval,
    base_num_query_heads=num_heads,
    base_num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    base_mlp_dim=16,
    num_draft_heads=min(model.num_draft_heads, 2),
    mtp_num_layers=min(model.mtp_num_layers, 2),
    normalization_layer_epsilon=max(model.normalization_layer_epsilon, 1e-3),
    scan_unroll=1,
    quantization="",
    attention="auto",
    sliding_window_size=min(model.sliding_window_size, 5),
    trainable_position_size=min(model.trainable_position_size, LENGTH),
    attention_block_q=4,
    lora=dataclasses.replace(model.lora, lora_rank=min(model.lora.lora_rank, 2)),
    scaling=scaling,
    rope=_rope(model, head_dim),
    mla=_latent(model.mla),
    gdn=_gated_delta(model.gdn),
    mamba=_mamba(model.mamba),
    global_layers=_listed(model.global_layers, model, num_layers),
    attention_layers=_listed(model.attention_layers, model, num_layers),
    hybrid_override_pattern=_pattern(model.hybrid_override_pattern),
    cycle=cycle,
    moe=moe,
  )


def _small(count: int, largest: int = 8) -> int:
  """A count of at most `largest` that has the powers of two of `count`, or is odd as it is."""
  if count <= largest:
    return count
  return max(math.gcd(count, largest), 3)


def _head_dim(model: ModelConfig) -> int:
  """Channels of which the rotating ones are even."""
  factor = model.rope.partial_rotary_factor
  for head_dim in (4, 8, 16, 32):
    rotated = int(head_dim * factor)
    if rotated and rotated % 2 == 0:
      return head_dim
  return model.head_dim


def _layers(model: ModelConfig, interval: int, num_shared: int) -> tuple[int, MoeConfig]:
  """(number of layers, the mixture of experts), with layers of every kind."""
  family = model.family
  moe = _moe(model.moe)
  at_least = min(2, model.base_num_decoder_layers)
  if family.global_layer_every:
    at_least = min(family.global_layer_every, model.base_num_decoder_layers)
  if family.layout == "listed_attention":  # two alike are a scan
    at_least = min(3, model.base_num_decoder_layers)
  if family.layout == "hybrid_pattern":
    return len(_pattern(model.hybrid_override_pattern)), moe
  if family.layout in ("gated_delta", "cycles"):
    if moe.mlp_only_layers:
      moe = dataclasses.replace(moe, mlp_only_layers=(0,))
    return (2 if model.base_num_decoder_layers > interval else 1) * interval + num_shared, moe
  if not family.is_moe:
    return at_least, moe
  if moe.mlp_only_layers:
    dense = model.moe.mlp_only_layers
    num_layers = at_least
    while len({layer in dense for layer in range(num_layers)}) < 2:
      num_layers += 1
    kept = tuple(layer for layer in dense if layer < num_layers)
    return num_layers, dataclasses.replace(moe, mlp_only_layers=kept)
  num_dense = min(moe.first_num_dense_layers, 1)
  step = moe.interleave_moe_layer_step
  num_others = math.ceil(max(at_least - num_dense, 1) / step) * step
  has_two = model.base_num_decoder_layers - moe.first_num_dense_layers > step
  if has_two and num_others == step == 1:  # a scan of one layer is no scan
    num_others = 2
  return num_dense + num_others, dataclasses.replace(moe, first_num_dense_layers=num_dense)


def _moe(moe: MoeConfig) -> MoeConfig:
  num_experts = _small(moe.num_experts)
  num_groups = moe.n_routing_groups
  if num_experts % num_groups or num_groups > 4:
    num_groups = math.gcd(num_experts, 4) if num_groups > 1 else 1
  num_chosen_groups = min(moe.topk_routing_group, num_groups)
  if moe.topk_routing_group < moe.n_routing_groups:
    num_chosen_groups = min(num_chosen_groups, max(num_groups - 1, 1))
  num_eligible = num_chosen_groups * num_experts // num_groups
  num_chosen = min(moe.num_experts_per_tok, 3, num_eligible)
  if moe.num_experts_per_tok < moe.num_experts:
    num_chosen = min(num_chosen, max(num_experts - 1, 1))
  return dataclasses.replace(
    moe,
    num_experts=num_experts,
    num_experts_per_tok=num_chosen,
    base_moe_mlp_dim=8,
    shared_experts=min(moe.shared_experts, 2),
    moe_latent_size=min(moe.moe_latent_size, 8),
    n_routing_groups=num_groups,
    topk_routing_group=num_chosen_groups,
    ragged_buffer_factor=-1.0,
    grouped_matmul="auto",
  )


def _rope(model: ModelConfig, head_dim: int) -> RopeConfig:
  rope = model.rope
  num_pairs = int(head_dim * rope.partial_rotary_factor) // 2
  if model.family.reads("mla"):
    num_pairs = 1
  original = rope.original_max_position_embeddings
  # Else no frequency, and no query, would change.
  if rope.rope_type == "yarn" or rope.query_scaling_beta:
    original = min(original, 8)
  return dataclasses.replace(
    rope,
    original_max_position_embeddings=original,
    rope_short_factor=rope.rope_short_factor[:num_pairs],
    rope_long_factor=rope.rope_long_factor[:num_pairs],
  )


def _latent(mla: LatentAttentionConfig) -> LatentAttentionConfig:
  return dataclasses.replace(
    mla,
    q_lora_rank=min(mla.q_lora_rank, 8),
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=6,
    indexer_n_heads=_small(mla.indexer_n_heads),
    indexer_head_dim=4,
    indexer_topk=min(mla.indexer_topk, 5),
  )


def _gated_delta(gdn: GatedDeltaConfig) -> GatedDeltaConfig:
  num_key_heads = _small(gdn.gdn_num_key_heads, 4)
  ratio = max(min(gdn.gdn_num_value_heads // gdn.gdn_num_key_heads, 2), 1)
  return dataclasses.replace(
    gdn,
    gdn_num_key_heads=num_key_heads,
    gdn_num_value_heads=num_key_heads * ratio,
    gdn_key_head_dim=4,
    gdn_value_head_dim=6,
    gdn_chunk_size=4,
  )


def _mamba(mamba: MambaConfig) -> MambaConfig:
  num_groups = _small(mamba.mamba_num_groups, 2)
  ratio = max(min(mamba.mamba_num_heads // mamba.mamba_num_groups, 4), 1)
  return dataclasses.replace(
    mamba,
    mamba_num_heads=num_groups * ratio,
    mamba_head_dim=4,
    mamba_num_groups=num_groups,
    mamba_state_dim=6,
    mamba_chunk_size=4,
  )


def _listed(numbers: tuple[int, ...], model: ModelConfig, num_layers: int) -> tuple[int, ...]:
  """The layers of `num_layers` that are listed: one, unless all or none of the model are."""
  if len(numbers) in (0, model.base_num_decoder_layers):
    return tuple(range(num_layers))[: len(numbers)]
  return (num_layers - 1,)


def _pattern(pattern: str) -> str:
  """A pattern of at most 8 layers of every kind, of which a part repeats."""
  if len(pattern) <= 8:
    return pattern
  kinds = "".join(dict.fromkeys(pattern))
  return 2 * kinds[:2] + kinds[2:]


def _cycle(cycle: CycleConfig, interval: int, head_dim: int) -> CycleConfig:
  return dataclasses.replace(
    cycle,
    global_head_dim=2 * head_dim if cycle.global_head_dim else 0,
    global_num_kv_heads=min(cycle.global_num_kv_heads, 1),
    num_kv_shared_layers=interval if cycle.num_kv_shared_layers else 0,
    hidden_size_per_layer_input=8 if cycle.hidden_size_per_layer_input else 0,
  )


def _optimizer(optimizer: OptimizerConfig) -> OptimizerConfig:
  return dataclasses.replace(
    optimizer,
    adam_eps=max(optimizer.adam_eps, ADAM_EPS),
    learning_rate_schedule_steps=SCHEDULE_STEPS,
  )


def _training(training: TrainingConfig) -> TrainingConfig:
  return dataclasses.replace(
    training,
    distill_top_k=min(training.distill_top_k, VOCAB // 2),
    qk_clip_threshold=min(training.qk_clip_threshold, QK_CLIP),
    deterministic_reductions=False,
    audit_period=0,
    logits_chunk_tokens=7,
    gradient_accumulation_steps=1,
  )
