"""Every implementation that a config key or an argument selects by name.

To add one, write it and add a line here: the key's `choices` and the contract tests follow. An
entry is "module:attribute" and is imported on first use, so the names are known without JAX.
"""

import pkgutil
from collections import ChainMap, UserDict
from collections.abc import Mapping
from typing import Any

from maxlite.config.errors import UserError


class Registry(UserDict[str, Any]):
  """Implementations by name; `registry[name]` imports a "module:attribute" entry."""

  def __getitem__(self, name: str) -> Any:
    entry = self.data[name]
    return pkgutil.resolve_name(entry) if isinstance(entry, str) else entry


def with_auto(registry: Registry) -> Mapping[str, Any]:
  """A live view of `registry` that begins with the name "auto"."""
  return ChainMap(registry, {"auto": None})


def resolve_backend(
  key: str, backends: Registry, auto: Mapping[str, str], name: str, platform: str
) -> str:
  """The entry of `backends` that `name` selects on `platform` (`cpu`, `gpu`, `tpu`).

  Args:
    key: the config key that selects the backend, for the error message.
    auto: the choice of "auto" by platform, and "other".

  Raises:
    UserError: there is no such backend.
  """
  if name == "auto":
    return auto.get(platform, auto["other"])
  if name not in backends:
    known = ", ".join(backends)
    raise UserError(f"{key}={name!r} is not a backend; choose auto or one of: {known}")
  return name


def _registry(template: str, *names: str) -> Registry:
  """A registry whose entries are `template` with {} replaced by their names."""
  return Registry((name, template.format(name)) for name in names)


# dataset_type -> (DataConfig, vocab_size, token cache directory) -> DataSource
SOURCES = _registry(
  "maxlite.data.sources:{}_source",
  *("synthetic", "text", "jsonl", "parquet", "arrow", "array_record", "chat"),
)
# packing_strategy -> (Tokens, row length, seed of the order or None) -> PackedRows
PACKING_STRATEGIES = Registry(
  concatenate="maxlite.data.packing:PackedDocuments",
  best_fit="maxlite.data.packing:BestFitDocuments",
)
# data_sampling -> (number of rows, seed) -> order of one epoch
ROW_ORDERS = Registry(
  shuffle="maxlite.data.row_order:shuffled_order", bootstrap="maxlite.data.row_order:BootstrapOrder"
)
# tokenizer_type -> (tokenizer_path) -> Tokenizer
TOKENIZERS = Registry(
  byte="maxlite.data.tokenizer:ByteTokenizer",
  huggingface="maxlite.data.tokenizer:HuggingFaceTokenizer",
  sentencepiece="maxlite.data.tokenizer:SentencePieceTokenizer",
)
# opt_type -> (OptimizerConfig, logical names of the parameters) -> optax.GradientTransformation
OPTIMIZERS = _registry("maxlite.optim.build:{}", "adamw", "lion", "adafactor", "muon")
# lr_schedule_type -> (OptimizerConfig, steps after the warm-up) -> optax.Schedule
SCHEDULES = _registry("maxlite.optim.schedules:{}", "cosine", "wsd", "constant")
# router: see layers/moe/expert_choice.py. GROUP_ROUTERS use n_routing_groups.
PLAIN_ROUTERS = _registry("maxlite.layers.moe.expert_choice:{}", "softmax_topk", "topk_softmax")
GROUP_ROUTERS = Registry(
  group_limited_greedy="maxlite.layers.moe.expert_choice:topk_softmax",
  sigmoid_group_topk="maxlite.layers.moe.expert_choice:sigmoid_group_topk",
)
ROUTERS: Mapping[str, Any] = ChainMap(GROUP_ROUTERS, PLAIN_ROUTERS)
# How tokens reach their experts: see layers/moe/dispatch. Each entry is a `Dispatch`, which states
# by which keys it is selected; of several that are, the last one is used.
DISPATCHES = _registry(
  "maxlite.layers.moe.dispatch.{}:DISPATCH", "ragged", "all_gather", "dense", "capacity"
)
# attention: see kernels/attention/api.py.
ATTENTION_BACKENDS = _registry(
  "maxlite.kernels.attention.{}:attention",
  *("reference", "chunked", "dot_product", "splash", "triton"),
)
# Those that can merge results over several sets of keys, for ring attention.
PARTIAL_ATTENTION_BACKENDS = _registry(
  "maxlite.kernels.attention.{}:PARTIAL_ATTENTION", "chunked", "triton"
)
ATTENTION_BACKENDS["cudnn"] = "maxlite.kernels.attention.dot_product:cudnn_attention"
# grouped_matmul: see kernels/grouped_matmul/api.py.
GROUPED_MATMUL_BACKENDS = _registry(
  "maxlite.kernels.grouped_matmul.{}:grouped_matmul",
  *("reference", "tiled", "megablox", "triton", "ragged_dot"),
)
# ensemble_strategy, simplest first: (EngineRequest) -> EnsembleEngine; see ensemble/engines.
ENSEMBLE_STRATEGIES = Registry(
  stacked="maxlite.ensemble.engines.stacked:build_stacked",
  fused="maxlite.ensemble.engines.stacked:build_fused",
  switched="maxlite.ensemble.engines.switched:SwitchEngine",
  submesh="maxlite.ensemble.engines.submesh:SubmeshEngine",
  processes="maxlite.ensemble.engines.processes:ProcessEngine",
  padded="maxlite.ensemble.engines.padded:PaddedEngine",
)
# sampler of `search` -> (seed) -> optuna.samplers.BaseSampler
SAMPLERS = Registry(
  tpe="optuna.samplers:TPESampler",
  cma="optuna.samplers:CmaEsSampler",
  random="optuna.samplers:RandomSampler",
)
# ensemble_executor -> () -> WorkerExecutor; see ensemble/workers/worker_pool.py.
ENSEMBLE_EXECUTORS = Registry(
  local="maxlite.ensemble.workers.worker_process:LocalExecutor",
  ray="maxlite.ensemble.workers.ray_executor:RayExecutor",
)
# callbacks -> () -> Callback; see training/callbacks.py.
CALLBACKS = Registry(completions="maxlite.inference.generation:CompletionsCallback")
# Losses: see training/loss.py. DRAFT_LOSSES need draft heads, and a phase that trains them;
# TAUGHT_LOSSES need a teacher.
TOKEN_LOSSES = Registry(next_token="maxlite.training.loss:NEXT_TOKEN")
DRAFT_LOSSES = Registry(
  match_head="maxlite.training.draft_loss:MATCH_HEAD",
  next_token_and_draft="maxlite.training.draft_loss:NEXT_TOKEN_AND_DRAFT",
)
TAUGHT_LOSSES = Registry(distill="maxlite.training.transforms.teacher:DISTILL")
RUN_LOSSES: Mapping[str, Any] = ChainMap(TAUGHT_LOSSES, TOKEN_LOSSES)
LOSSES: Mapping[str, Any] = ChainMap(DRAFT_LOSSES, TAUGHT_LOSSES, TOKEN_LOSSES)
# Folders with the parameters of a model: see training/model_weights.py.
WEIGHT_FORMATS = Registry(
  run="maxlite.training.model_weights:RunWeights", huggingface="maxlite.hf.load_model:HfWeights"
)
