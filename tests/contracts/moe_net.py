"""Training steps of tiny decoders in float64, for comparison with a dense reference.

The reference computes every expert on every token on one device, without remat or accumulation. All
results of a step are compared: each loss, the gradient of every parameter, the gradient norm and
the load of every expert. Every token has a random weight in the loss, so that no cotangent is 1.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.config import load_config
from maxlite.data.batch import Batch
from maxlite.models import Decoder
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.step.gradients import build_gradients
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import build_train_step
from maxlite.training.loss import NEXT_TOKEN, DecoderLoss

NUM_ROWS = 24
LENGTH = 8
VOCAB = 32
NUM_EXPERTS = 8
NUM_CHOSEN = 3
NUM_MOE_LAYERS = 2
KEYS = {
  "dataset_type": "synthetic",
  "vocab_size": VOCAB,
  "base_emb_dim": 16,
  "base_num_query_heads": 8,
  "base_num_kv_heads": 8,
  "head_dim": 4,
  "base_mlp_dim": 16,
  "num_experts": NUM_EXPERTS,
  "num_experts_per_tok": NUM_CHOSEN,
  "base_moe_mlp_dim": 8,
  "router": "sigmoid_group_topk",
  "routed_bias": True,  # forces the routing
  "routed_bias_update_rate": 0,
  "load_balance_loss_weight": 0.3,
  "router_z_loss_weight": 0.2,
  "z_loss_multiplier": 0.1,
  "logits_chunk_tokens": 7,
  "max_target_length": LENGTH,
  "attention_block_q": 4,
}
FAMILIES = {
  "mixtral": {"decoder_block": "mixtral", "base_num_decoder_layers": 2},
  "mixtral with adapters": {
    "decoder_block": "mixtral",
    "base_num_decoder_layers": 2,
    "lora_rank": 2,
    "lora_experts": True,
  },
  "deepseek": {
    "decoder_block": "deepseek",
    "base_num_decoder_layers": 3,
    "first_num_dense_layers": 1,
    "shared_experts": 1,
    "load_balance_loss_scope": "sequence",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
  },
}
DISPATCHES = {
  "ragged": {},
  "all_gather": {"use_ring_of_experts": True},
  "dense": {"sparse_matmul": False},
  "capacity": {"sparse_matmul": False, "capacity_factor": 8.0},
}
ORACLE = {"sparse_matmul": False, "grouped_matmul": "auto", "attention": "reference"}
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Bias added to each expert's score, of which the three highest are chosen.
ROUTINGS = {
  "uniform": (0, 0, 0, 0, 0, 0, 0, 0),
  "skewed": (0.3, 0.2, 0.1, 0, 0, -0.1, -0.2, 0.1),
  "hot": (0, 9, 0, 0, 9, 0, 9, 0),
  "empty": (-9, 0, 0, -9, 0, 0, -9, 0),
  "a shard that gets nothing": (0, 0, 0, 0, -9, -9, 0, 0),
}


@dataclasses.dataclass(frozen=True)
class Variant:
  """One way to compute a step: a mesh and a path through the code."""

  mesh: tuple[int, ...]  # degrees, in the order of MESH_AXES
  dispatch: str
  backend: str = "auto"
  family: str = "mixtral"
  remat: bool = False
  scan: bool = True
  accumulate: int = 1
  context: str = "all_gather"  # context_parallel_strategy

  def __str__(self) -> str:
    degrees = []
    for axis, degree in zip(MESH_AXES, self.mesh, strict=True):
      if degree > 1:
        degrees.append(f"{axis}={degree}")
    words = degrees or ["one device"]
    words += [self.dispatch, self.backend, self.family]
    if self.remat:
      words.append("remat")
    if self.scan:
      words.append("scan")
    words += [f"accumulate={self.accumulate}", self.context]
    return " ".join(words)


def config_of(family: str, **keys: Any) -> Any:
  """The config with float64 types, which users cannot select."""
  words = [f"{name}={value}" for name, value in (KEYS | FAMILIES[family] | keys).items()]
  cfg = load_config(words)
  model = dataclasses.replace(cfg.model, dtype="float64", weight_dtype="float64")
  return dataclasses.replace(cfg, model=model)


def batch_of() -> Batch:
  """Rows with several documents and unequal lengths, some with padding only."""
  draw = np.random.default_rng(0)
  segment_BT = np.sort(draw.integers(1, 4, (NUM_ROWS, LENGTH)), axis=1)
  length_B = draw.integers(1, LENGTH + 1, NUM_ROWS)
  length_B[[2, 7, 8, 9]] = 0
  real_BT = np.arange(LENGTH) < length_B[:, None]
  tokens_BT, targets_BT = draw.integers(0, VOCAB, (2, NUM_ROWS, LENGTH)).astype(np.int32)
  return Batch(
    tokens_BT=tokens_BT,
    targets_BT=targets_BT,
    segment_BT=(segment_BT * real_BT).astype(np.int32),
    position_BT=np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (NUM_ROWS, LENGTH)),
    weight_BT=draw.uniform(0.2, 2, (NUM_ROWS, LENGTH)) * real_BT,
  )


def params_of(family: str) -> dict:
  """Flat {path: array} of scanned layers with random weights."""
  model = Decoder(config_of(family).model, sharder_of((1,) * len(MESH_AXES)))
  flat = flatten_dict(_init(model), sep="/")
  draw = np.random.default_rng(1)
  params = {}
  for path, leaf in flat.items():
    scale = 0.5
    if leaf.ndim > 2:
      scale = leaf.shape[-2] ** -0.5
    params[path] = draw.normal(size=leaf.shape) * scale
  return params


def sharder_of(mesh: tuple[int, ...]) -> Sharder:
  devices = jax.devices()[: int(np.prod(mesh))]
  return Sharder(build_mesh(mesh, (1,) * len(MESH_AXES), devices))


class Net:
  """The steps of all variants; compiles each once."""

  def __init__(self) -> None:
    self._params_of = functools.cache(params_of)
    self._step_of = functools.cache(compile_step)
    self.oracle_of = functools.cache(self._oracle)

  def results_of(self, variant: Variant, routing: str) -> dict[str, np.ndarray]:
    """Flat {name: value} of all results of one step."""
    params = self._params_of(variant.family)
    bias = next(path for path in params if path.endswith("router/bias"))
    forced_NE = np.tile(np.float32(ROUTINGS[routing]), (NUM_MOE_LAYERS, 1))
    params = _restacked(params | {bias: forced_NE}, variant.scan)
    step = self._step_of(variant)
    with jax.enable_x64(True):
      state, metrics = step(params, batch_of())
    gradients = _stacked(flatten_dict(jax.device_get(state.opt_state), sep="/"))
    results = {f"gradient of {path}": leaf for path, leaf in gradients.items()}
    return results | jax.device_get(metrics)

  def _oracle(self, family: str, routing: str) -> dict[str, np.ndarray]:
    one_device = (1,) * len(MESH_AXES)
    return self.results_of(Variant(one_device, "oracle", family=family), routing)


def _keys_of(variant: Variant) -> dict[str, Any]:
  """The config keys of a variant."""
  if variant.dispatch == "oracle":
    keys = dict(ORACLE)
  else:
    keys = dict(DISPATCHES[variant.dispatch])
  keys["scan_layers"] = variant.scan
  keys["remat_policy"] = "full" if variant.remat else "none"
  keys["gradient_accumulation_steps"] = variant.accumulate
  keys["context_parallel_strategy"] = variant.context
  if "sparse_matmul" not in keys:
    keys["grouped_matmul"] = variant.backend
  return keys


def compile_step(variant: Variant) -> Any:
  """The compiled train step, with an optimizer whose state is the gradient."""
  cfg = config_of(variant.family, **_keys_of(variant))
  sharder = sharder_of(variant.mesh)
  model = Decoder(cfg.model, sharder)
  keep = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params: (jax.tree.map(jnp.zeros_like, updates), updates),
  )
  loss = DecoderLoss(model, NEXT_TOKEN, cfg.training, cfg.model.moe)
  step = build_train_step(build_gradients(loss, cfg.training.gradient_accumulation_steps), keep)

  def run(params: dict, batch: Batch) -> tuple:
    params = unflatten_dict(params, sep="/")
    zero = jnp.zeros((), jnp.int32)
    rng = jax.random.key_data(jax.random.key(0))
    return step(TrainState(zero, params, keep.init(params), rng, zero, zero), batch)

  boxes = flatten_dict(_init(model, boxed=True), sep="/")
  shardings = {path: sharder.sharding(box.names) for path, box in boxes.items()}
  rows = sharder.sharding(("activation_batch", "activation_length"))
  return jax.jit(run, in_shardings=(shardings, rows), compiler_options=QUICK_COMPILE)


def _init(model: Any, boxed: bool = False) -> dict:
  tokens_BT = np.zeros((NUM_ROWS, LENGTH), np.int32)
  with jax.enable_x64(True):
    init = functools.partial(model.init, method=model.hidden_and_unembedding)
    variables = jax.eval_shape(init, jax.random.key(0), tokens_BT, tokens_BT, tokens_BT)
  if boxed:
    return variables["params"]
  return meta.unbox(variables["params"])


def _restacked(params: dict, scan: bool) -> dict:
  """Parameters of scanned layers, or of separate layers."""
  if scan:
    return params
  flat = {}
  for path, leaf in params.items():
    stack, _, rest = path.partition("/")
    if stack.endswith("layers"):
      flat |= {f"{stack}_{i}/{rest}": layer for i, layer in enumerate(leaf)}
    else:
      flat[path] = leaf
  return flat


def _stacked(params: dict) -> dict:
  """The inverse: layers_0/x, layers_1/x, ... as one layers/x."""
  flat = {}
  layers = {}
  for path, leaf in params.items():
    head, _, rest = path.partition("/")
    stack, _, number = head.rpartition("_")
    if stack.endswith("layers") and number.isdigit():
      layers.setdefault(f"{stack}/{rest}", {})[int(number)] = leaf
    else:
      flat[path] = leaf
  for path, by_layer in layers.items():
    in_order = [by_layer[i] for i in sorted(by_layer)]
    flat[path] = np.stack(in_order)
  return flat
