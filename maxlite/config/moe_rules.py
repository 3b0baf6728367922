"""Rules of mixture-of-experts models; rules.py has their form."""

from collections.abc import Callable

from maxlite.config.registry import GROUP_ROUTERS
from maxlite.config.rules import Rules, Values, largest_divisor


def _layers(v: Values) -> Rules:
  text = "one expert is a dense model; write decoder_block=llama"
  yield v.num_experts == 1, "num_experts decoder_block", text
  text = f"there are fewer experts; write num_experts_per_tok={v.num_experts} or less"
  yield v.num_experts_per_tok > v.num_experts, "num_experts_per_tok num_experts", text
  fix = f"first_num_dense_layers={v.base_num_decoder_layers - 1} or less, or decoder_block=llama"
  others = v.base_num_decoder_layers - v.first_num_dense_layers
  keys = "first_num_dense_layers base_num_decoder_layers"
  yield others <= 0, keys, f"leaves no MoE layer; write {fix}"
  fix = f"write interleave_moe_layer_step={largest_divisor(others, v.interleave_moe_layer_step)}"
  keys = f"interleave_moe_layer_step {keys}"
  text = f"does not divide the {others} other layers; {fix}"
  yield others % v.interleave_moe_layer_step, keys, text


def _router(v: Values) -> Rules:
  num_groups = v.n_routing_groups
  is_grouped = v.router in GROUP_ROUTERS
  if is_grouped:
    divisor = largest_divisor(v.num_experts, num_groups)
    text = f"groups must have equal size; write n_routing_groups={divisor}"
    yield v.num_experts % num_groups, "n_routing_groups num_experts", text
    text = f"there are fewer groups; write topk_routing_group={num_groups} or less"
    yield v.topk_routing_group > num_groups, "topk_routing_group n_routing_groups", text
    eligible = v.topk_routing_group * v.num_experts // num_groups
    fix = f"write num_experts_per_tok={eligible} or less, or a larger topk_routing_group"
    keys = "num_experts_per_tok topk_routing_group n_routing_groups num_experts"
    text = f"the groups of a token hold {eligible} experts; {fix}"
    yield eligible < v.num_experts_per_tok, keys, text
  text = "its weights always sum to one; write router=topk_softmax or norm_topk_prob=true"
  yield v.router == "softmax_topk" and not v.norm_topk_prob, "norm_topk_prob router", text
  fix = f"write router={next(iter(GROUP_ROUTERS))} or n_routing_groups=1"
  text = f"this router has no groups; {fix}"
  yield num_groups > 1 and not is_grouped, "n_routing_groups router", text


def _dispatch(v: Values) -> Rules:
  for key in ("capacity_factor", "ragged_buffer_factor"):
    text = f"leaves no room for a token; write {key}=1.25, or -1 to drop nothing"
    yield -1 < vars(v)[key] <= 0, key, text
  text = "sparse matmuls have no slots; write sparse_matmul=false or capacity_factor=-1"
  yield v.sparse_matmul and v.capacity_factor != -1, "capacity_factor sparse_matmul", text
  key = "use_ring_of_experts" if v.use_ring_of_experts else "sparse_matmul"
  text = "only the ragged all-to-all has that buffer; write ragged_buffer_factor=-1"
  is_ragged = v.sparse_matmul and not v.use_ring_of_experts
  yield v.ragged_buffer_factor != -1 and not is_ragged, f"ragged_buffer_factor {key}", text
  text = "needs sparse matmuls; write sparse_matmul=true or use_ring_of_experts=false"
  is_dense = not v.sparse_matmul
  yield v.use_ring_of_experts and is_dense, "use_ring_of_experts sparse_matmul", text
  text = "experts would not be quantized; write sparse_matmul=true or quantization=''"
  yield v.quantization and is_dense and v.family.is_moe, "quantization sparse_matmul", text
  text = "megablox=false forbids it; write megablox=true or grouped_matmul=auto"
  yield v.grouped_matmul == "megablox" and not v.megablox, "grouped_matmul megablox", text
  text = "only sparse matmuls are grouped; write grouped_matmul=auto or sparse_matmul=true"
  yield v.grouped_matmul != "auto" and is_dense, "grouped_matmul sparse_matmul", text


MOE_RULES: tuple[Callable[[Values], Rules], ...] = (_layers, _router, _dispatch)
