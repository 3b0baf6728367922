"""Every implementation that a config key or an argument selects by name.

To add one, write it and add a line here: the key's `choices` and the contract tests follow. An
entry is "module:attribute" and is imported on first use, so the names are known without JAX.
"""

import pkgutil
from collections import ChainMap, UserDict
from collections.abc import Mapping
from typing import Any


class Registry(UserDict[str, Any]):
  """Implementations by name; `registry[name]` imports a "module:attribute" entry."""

  def __getitem__(self, name: str) -> Any:
    entry = self.data[name]
    return pkgutil.resolve_name(entry) if isinstance(entry, str) else entry


def with_auto(registry: Registry) -> Mapping[str, Any]:
  """A live view of `registry` that begins with the name "auto"."""
  return ChainMap(registry, {"auto": None})


def _entries(module: str, *names: str) -> dict[str, str]:
  """Entries whose attribute in `module` has the entry's name."""
  return {name: f"maxlite.{module}:{name}" for name in names}


# dataset_type -> (DataConfig, vocab_size, token cache directory) -> DataSource
SOURCES = Registry(
  {
    "synthetic": "maxlite.data.sources:synthetic_source",
    "text": "maxlite.data.sources:text_source",
    "jsonl": "maxlite.data.sources:jsonl_source",
    "parquet": "maxlite.data.sources:parquet_source",
    "chat": "maxlite.data.sources:chat_source",
  }
)
# data_sampling -> (number of rows, seed) -> order of one epoch
ROW_ORDERS = Registry(
  {
    "shuffle": "maxlite.data.sampler:shuffled_order",
    "bootstrap": "maxlite.data.sampler:BootstrapOrder",
  }
)
# tokenizer_type -> (tokenizer_path) -> Tokenizer
TOKENIZERS = Registry(
  {
    "byte": "maxlite.data.tokenizers.tokenizer:ByteTokenizer",
    "huggingface": "maxlite.data.tokenizers.tokenizer:HuggingFaceTokenizer",
    "sentencepiece": "maxlite.data.tokenizers.tokenizer:SentencePieceTokenizer",
  }
)
# opt_type -> (OptimizerConfig, logical names of the parameters) -> optax.GradientTransformation
OPTIMIZERS = Registry(_entries("optim.build", "adamw", "lion", "adafactor", "muon"))
# lr_schedule_type -> (OptimizerConfig, steps after the warm-up) -> optax.Schedule
SCHEDULES = Registry(_entries("optim.schedules", "cosine", "wsd", "constant"))
# router: see layers/moe/router.py.
ROUTERS = Registry(
  _entries(
    "layers.moe.router",
    *("softmax_topk", "topk_softmax", "group_limited_greedy", "sigmoid_group_topk"),
  )
)
# How tokens reach their experts: see layers/moe/dispatch.
DISPATCHES = Registry(
  {
    "ragged": "maxlite.layers.moe.dispatch.ragged:apply_experts",
    "all_gather": "maxlite.layers.moe.dispatch.all_gather:apply_experts",
    "dense": "maxlite.layers.moe.dispatch.dense:apply_experts",
    "capacity": "maxlite.layers.moe.dispatch.capacity:apply_experts",
  }
)
# attention: see kernels/attention/api.py.
ATTENTION_BACKENDS = Registry(
  {
    "reference": "maxlite.kernels.attention.reference:attention",
    "chunked": "maxlite.kernels.attention.chunked:attention",
    "dot_product": "maxlite.kernels.attention.dot_product:attention",
  }
)
# grouped_matmul: see kernels/grouped_matmul/api.py.
GROUPED_MATMUL_BACKENDS = Registry(
  {
    "reference": "maxlite.kernels.grouped_matmul.reference:grouped_matmul",
    "tiled": "maxlite.kernels.grouped_matmul.tiled:grouped_matmul",
    "megablox": "maxlite.kernels.grouped_matmul.megablox:grouped_matmul",
    "triton": "maxlite.kernels.grouped_matmul.triton:grouped_matmul",
    "ragged_dot": "maxlite.kernels.grouped_matmul.ragged_dot:grouped_matmul",
  }
)
# ensemble_strategy, simplest first: (EngineRequest) -> Engine; see ensemble/engines/engine_base.py.
ENSEMBLE_STRATEGIES = Registry(
  {
    "stacked": "maxlite.ensemble.engines.stacked:build_stacked",
    "fused": "maxlite.ensemble.engines.stacked:build_fused",
    "padded": "maxlite.ensemble.engines.stacked:build_padded",
    "switched": "maxlite.ensemble.engines.switched:SwitchEngine",
    "submesh": "maxlite.ensemble.engines.submesh:SubmeshEngine",
    "processes": "maxlite.ensemble.engines.processes:ProcessEngine",
  }
)
# ensemble_executor -> () -> WorkerExecutor; see ensemble/worker_pool.py.
ENSEMBLE_EXECUTORS = Registry(
  {
    "local": "maxlite.ensemble.worker_process:LocalExecutor",
    "ray": "maxlite.ensemble.ray_executor:RayExecutor",
  }
)
# Losses of a phase: see training/loss.py. DRAFT_LOSSES are those that need draft heads.
TOKEN_LOSSES = Registry({"next_token": "maxlite.training.loss:NEXT_TOKEN"})
DRAFT_LOSSES = Registry(
  {
    "match_head": "maxlite.training.loss:MATCH_HEAD",
    "next_token_and_draft": "maxlite.training.loss:NEXT_TOKEN_AND_DRAFT",
  }
)
LOSSES: Mapping[str, Any] = ChainMap(DRAFT_LOSSES, TOKEN_LOSSES)
