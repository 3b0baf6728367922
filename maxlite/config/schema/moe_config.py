"""The mixture-of-experts block."""

import dataclasses

from maxlite.config.config_field import field, model_field
from maxlite.registry import GROUPED_MATMUL_BACKENDS, ROUTERS, with_auto


def _tile(what: str) -> tuple[int, ...]:
  doc = f"Megablox tile of {what}: [rows, embed, mlp]; []: by chip and shape."
  tile: tuple[int, ...] = field((), doc, low=1)
  return tile


@dataclasses.dataclass(frozen=True)
class TilesConfig:
  """Tiles of the Megablox kernels, per projection and pass."""

  wi_tile_fwd: tuple[int, ...] = _tile("wi in the forward pass")
  wi_tile_dlhs: tuple[int, ...] = _tile("wi in the gradient of rows")
  wi_tile_drhs: tuple[int, ...] = _tile("wi in the gradient of weights")
  wo_tile_fwd: tuple[int, ...] = _tile("wo in the forward pass")
  wo_tile_dlhs: tuple[int, ...] = _tile("wo in the gradient of rows")
  wo_tile_drhs: tuple[int, ...] = _tile("wo in the gradient of weights")


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """The mixture-of-experts block; read if the model family is a mixture."""

  num_experts: int = model_field(8, "Experts per MoE layer.", low=1)
  num_experts_per_tok: int = model_field(2, "Experts per token (top-k).", low=1)
  base_moe_mlp_dim: int = model_field(384, "Hidden width of one expert.", low=1)
  shared_experts: int = model_field(
    0, "Shared experts, computed as one MLP of shared_experts x base_moe_mlp_dim.", low=0
  )
  first_num_dense_layers: int = model_field(0, "Dense layers before the first MoE layer.", low=0)
  interleave_moe_layer_step: int = model_field(
    1, "After the leading dense layers, every n-th layer is MoE and the others are dense.", low=1
  )
  mlp_only_layers: tuple[int, ...] = model_field(
    (),
    "Numbers, from 0, of the layers with a dense MLP, where these two keys cannot say which they "
    "are; []: as they say.",
    low=0,
  )
  expert_bias: bool = model_field(False, "Biases in the experts' projections.")
  mlp_activations_limit: float = field(
    0.0, "Clamp the gate from above and the linear part on both sides at this; 0: no clamp.", low=0
  )
  router: str = field(
    "softmax_topk",
    "How experts are selected and weighted (docs/moe.md): `softmax_topk` as in Mixtral, "
    "`topk_softmax` as in Qwen3-MoE, `topk_sigmoid` as in Llama 4, `group_limited_greedy` as in "
    "DeepSeek-V2, `sigmoid_group_topk` as in DeepSeek-V3.",
    choices=ROUTERS,
  )
  norm_topk_prob: bool = field(True, "Normalize the weights of the selected experts to sum 1.")
  routed_scaling_factor: float = field(1.0, "Factor on the selected experts' weights.", low=0)
  n_routing_groups: int = field(1, "Groups of experts for group-limited routing.", low=1)
  topk_routing_group: int = field(1, "Groups that a token may be routed to.", low=1)
  routed_bias: bool = model_field(
    False, "Add a bias per expert to the selection only, updated to balance the load."
  )
  routed_bias_update_rate: float = field(0.001, "Change of that bias per optimizer step.", low=0)
  float32_gate_logits: bool = field(True, "Compute the router in float32, whatever dtype is.")
  router_jitter: float = field(
    0.0, "In training, scale the router's input by uniform noise in 1 +- this.", low=0, high=1
  )
  use_random_routing: bool = field(False, "Route randomly with an even load, for benchmarks.")
  load_balance_loss_weight: float = field(0.01, "Weight of the load-balance loss.", low=0)
  load_balance_loss_scope: str = field(
    "batch",
    "Balance the load over the global `batch`, or within each `sequence`.",
    choices=("batch", "sequence"),
  )
  router_z_loss_weight: float = field(0.001, "Weight of the router z-loss.", low=0)
  sparse_matmul: bool = field(
    True, "Compute only a token's own experts; false: see capacity_factor."
  )
  capacity_factor: float = field(
    -1.0,
    "With sparse_matmul=false: slots per expert and sequence, as a multiple of an even load; "
    "tokens beyond it are dropped. -1: compute every expert on every token and drop nothing.",
    low=-1,
  )
  use_ring_of_experts: bool = field(
    False, "All-gather tokens and reduce-scatter results, instead of the ragged all-to-all."
  )
  ragged_buffer_factor: float = field(
    -1.0,
    "Receive buffer of the ragged all-to-all, as a multiple of an even load; see ragged_overflow "
    "for rows beyond it. -1: the worst case, which no load exceeds.",
    low=-1,
  )
  ragged_overflow: str = field(
    "replay",
    "What a step does if such a buffer overflows: `replay` discards the step and takes it again "
    "with buffers of the worst case, so nothing is dropped; `drop` drops the rows beyond it.",
    choices=("replay", "drop"),
  )
  megablox: bool = field(
    True, "Let grouped_matmul=auto select the Megablox kernels on TPU; false: XLA's ragged dot."
  )
  grouped_matmul: str = field(
    "auto", "Backend of the experts' matmuls.", choices=with_auto(GROUPED_MATMUL_BACKENDS)
  )
  tiles: TilesConfig = TilesConfig()

  @property
  def has_bounded_buffer(self) -> bool:
    """Whether a receive buffer may be smaller than the worst case."""
    return self.ragged_buffer_factor > 0

  @property
  def drops_overflow(self) -> bool:
    """Whether rows beyond a bounded buffer are dropped."""
    return self.has_bounded_buffer and self.ragged_overflow == "drop"

  @property
  def replays_overflow(self) -> bool:
    """Whether training steps have bounded buffers, and are replayed where one overflows."""
    return self.has_bounded_buffer and self.ragged_overflow == "replay"
