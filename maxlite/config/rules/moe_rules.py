"""Rules on mixture-of-experts models; those of other families are not checked."""

from maxlite.config.moe_plan import moe_plan
from maxlite.config.raw_values import show
from maxlite.config.rules.violation import (
  ENSEMBLE_KEYS,
  Violation,
  Violations,
  changed_keys,
  largest_divisor,
)
from maxlite.config.schema import DEFAULTS, Config
from maxlite.registry import GROUP_ROUTERS


def moe_layers(cfg: Config) -> Violations:
  """The rules on the number of experts, and on the layers that have them."""
  model = cfg.model
  moe = model.moe
  if not model.family.is_moe:
    return
  if moe.num_experts == 1:
    yield Violation(
      ["num_experts", "decoder_block"], "one expert is a dense model; write decoder_block=llama"
    )
  if moe.num_experts_per_tok > moe.num_experts:
    yield Violation(
      ["num_experts_per_tok", "num_experts"],
      f"there are fewer experts; write num_experts_per_tok={moe.num_experts} or less",
    )
  if moe.mlp_only_layers:
    yield from _mlp_only_layers(cfg)
    return
  keys = ["first_num_dense_layers", "base_num_decoder_layers"]
  num_others = model.base_num_decoder_layers - moe.first_num_dense_layers
  if num_others <= 0:
    limit = model.base_num_decoder_layers - 1
    yield Violation(
      keys,
      f"leaves no MoE layer; write first_num_dense_layers={limit} or less, or decoder_block=llama",
    )
  elif num_others % moe.interleave_moe_layer_step:
    divisor = largest_divisor(num_others, moe.interleave_moe_layer_step)
    yield Violation(
      ["interleave_moe_layer_step", *keys],
      f"does not divide the {num_others} other layers; write interleave_moe_layer_step={divisor}",
    )


def _mlp_only_layers(cfg: Config) -> Violations:
  """The rules on dense layers that are listed."""
  moe = cfg.model.moe
  num_layers = cfg.model.base_num_decoder_layers
  for key in changed_keys(cfg, ["first_num_dense_layers", "interleave_moe_layer_step"]):
    yield Violation(
      [key, "mlp_only_layers"], f"the list has all dense layers; write {key}={show(DEFAULTS[key])}"
    )
  if list(moe.mlp_only_layers) != sorted({*moe.mlp_only_layers} & {*range(num_layers)}):
    yield Violation(
      ["mlp_only_layers", "base_num_decoder_layers"],
      f"must be different numbers from 0 to {num_layers - 1}, in order",
    )
    return
  has_experts = [layer not in moe.mlp_only_layers for layer in range(num_layers)]
  plan = moe_plan(has_experts)
  if cfg.model.family.reads("gdn"):  # the keys of a plan do not apply to its units
    plan = None
  if not any(has_experts):
    yield Violation(
      ["mlp_only_layers"], "leaves no MoE layer; write fewer numbers, or decoder_block=llama"
    )
  elif plan is not None:
    num_dense, step = plan
    yield Violation(
      ["mlp_only_layers"],
      f"write first_num_dense_layers={num_dense} interleave_moe_layer_step={step} for these layers",
    )


def adapters(cfg: Config) -> Violations:
  """The rules on the adapters of routed experts."""
  model = cfg.model
  if not model.lora.lora_experts:
    return
  if not model.family.is_moe:
    yield Violation(
      ["lora_experts", "decoder_block"], "this family has no experts; write lora_experts=false"
    )
  elif model.lora.lora_rank == 0:
    yield Violation(
      ["lora_experts", "lora_rank"],
      "adapters need a rank; write lora_rank=8, or lora_experts=false",
    )


def router(cfg: Config) -> Violations:
  """The rules on the router and on its groups."""
  moe = cfg.model.moe
  if not cfg.model.family.is_moe:
    return
  is_grouped = moe.router in GROUP_ROUTERS
  if is_grouped:
    yield from _groups(cfg)
  num_per_unit = 1
  if cfg.model.family.reads("gdn") or cfg.model.family.reads("cycle"):
    num_per_unit = cfg.model.inhomogeneous_layer_cycle_interval
  if moe.routed_bias and num_per_unit > 1:
    yield Violation(
      ["routed_bias", "decoder_block"],
      f"its update has no rule for units of {num_per_unit} MoE layers; write routed_bias=false",
    )
  if moe.router == "softmax_topk" and not moe.norm_topk_prob:
    yield Violation(
      ["norm_topk_prob", "router"],
      "its weights always sum to one; write router=topk_softmax or norm_topk_prob=true",
    )
  form = cfg.model.family.moe
  if form is not None and form.scales_inputs:
    if moe.num_experts_per_tok > 1:
      yield Violation(
        ["num_experts_per_tok", "decoder_block"],
        "the weight of a token's one expert multiplies its input; write num_experts_per_tok=1",
      )
    elif moe.norm_topk_prob:
      yield Violation(
        ["norm_topk_prob", "decoder_block"],
        "the weight of a token's one expert would be 1; write norm_topk_prob=false",
      )
  if moe.n_routing_groups > 1 and not is_grouped:
    grouped = next(iter(GROUP_ROUTERS))
    yield Violation(
      ["n_routing_groups", "router"],
      f"this router has no groups; write router={grouped} or n_routing_groups=1",
    )


def _groups(cfg: Config) -> Violations:
  """The rules on the groups of experts from which a token chooses."""
  moe = cfg.model.moe
  num_groups = moe.n_routing_groups
  if moe.num_experts % num_groups:
    divisor = largest_divisor(moe.num_experts, num_groups)
    yield Violation(
      ["n_routing_groups", "num_experts"],
      f"groups must have equal size; write n_routing_groups={divisor}",
    )
  if moe.topk_routing_group > num_groups:
    yield Violation(
      ["topk_routing_group", "n_routing_groups"],
      f"there are fewer groups; write topk_routing_group={num_groups} or less",
    )
  num_eligible = moe.topk_routing_group * moe.num_experts // num_groups
  if num_eligible < moe.num_experts_per_tok:
    yield Violation(
      ["num_experts_per_tok", "topk_routing_group", "n_routing_groups", "num_experts"],
      f"the groups of a token hold {num_eligible} experts; write num_experts_per_tok={num_eligible}"
      " or less, or a larger topk_routing_group",
    )


def buffers(cfg: Config) -> Violations:
  """The rules on the slots and buffers that hold the rows of experts."""
  moe = cfg.model.moe
  if not cfg.model.family.is_moe:
    return
  factors = {
    "capacity_factor": moe.capacity_factor,
    "ragged_buffer_factor": moe.ragged_buffer_factor,
  }
  for key, factor in factors.items():
    if -1 < factor <= 0:
      yield Violation([key], f"leaves no room for a token; write {key}=1.25, or -1 to drop nothing")
  if moe.sparse_matmul and moe.capacity_factor != -1:
    yield Violation(
      ["capacity_factor", "sparse_matmul"],
      "sparse matmuls have no slots; write sparse_matmul=false or capacity_factor=-1",
    )
  is_ragged = moe.sparse_matmul and not moe.use_ring_of_experts
  if moe.ragged_buffer_factor != -1 and not is_ragged:
    key = "sparse_matmul"
    if moe.use_ring_of_experts:
      key = "use_ring_of_experts"
    yield Violation(
      ["ragged_buffer_factor", key],
      "only the ragged all-to-all has that buffer; write ragged_buffer_factor=-1",
    )
  yield from _overflow(cfg)


def _overflow(cfg: Config) -> Violations:
  """The rules on what follows if a receive buffer overflows."""
  moe = cfg.model.moe
  if moe.ragged_overflow == "drop" and not moe.has_bounded_buffer:
    yield Violation(
      ["ragged_overflow", "ragged_buffer_factor"],
      "no buffer can overflow; write ragged_buffer_factor=1.5, or ragged_overflow=replay",
    )
  if not moe.replays_overflow:
    return
  # There, a step is several updates, or the batch of the next step depends on its result.
  for key in changed_keys(cfg, [*ENSEMBLE_KEYS, "phases", "diloco_sync_period"]):
    yield Violation(
      ["ragged_buffer_factor", "ragged_overflow", key],
      f"steps are not replayed there; write ragged_overflow=drop, or {key}={show(DEFAULTS[key])}",
    )


def expert_matmuls(cfg: Config) -> Violations:
  """The rules on the matmuls of the experts."""
  model = cfg.model
  moe = model.moe
  if not model.family.is_moe:
    return
  if moe.use_ring_of_experts and not moe.sparse_matmul:
    yield Violation(
      ["use_ring_of_experts", "sparse_matmul"],
      "needs sparse matmuls; write sparse_matmul=true or use_ring_of_experts=false",
    )
  if model.quantization and not moe.sparse_matmul:
    yield Violation(
      ["quantization", "sparse_matmul"],
      "experts would not be quantized; write sparse_matmul=true or quantization=''",
    )
  if moe.grouped_matmul == "megablox" and not moe.megablox:
    yield Violation(
      ["grouped_matmul", "megablox"],
      "megablox=false forbids it; write megablox=true or grouped_matmul=auto",
    )
  if moe.grouped_matmul != "auto" and not moe.sparse_matmul:
    yield Violation(
      ["grouped_matmul", "sparse_matmul"],
      "only sparse matmuls are grouped; write grouped_matmul=auto or sparse_matmul=true",
    )


MOE_RULES = (moe_layers, adapters, router, buffers, expert_matmuls)
