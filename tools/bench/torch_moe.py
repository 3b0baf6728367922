"""The mixture-of-experts model of moe.py in `transformers`: Mixtral with grouped matmuls."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from maxlite.config import Config


def mixtral_step(cfg: Config) -> Callable[[], Any]:
  """A training step on one batch: forward, backward, clipping, AdamW."""
  model_cfg = cfg.model
  length = cfg.data.max_target_length
  mixtral = MixtralConfig(
    vocab_size=model_cfg.vocab_size,
    hidden_size=model_cfg.base_emb_dim,
    intermediate_size=model_cfg.moe.base_moe_mlp_dim,
    num_hidden_layers=model_cfg.base_num_decoder_layers,
    num_attention_heads=model_cfg.base_num_query_heads,
    num_key_value_heads=model_cfg.base_num_kv_heads,
    head_dim=model_cfg.head_dim,
    max_position_embeddings=length,
    num_local_experts=model_cfg.moe.num_experts,
    num_experts_per_tok=model_cfg.moe.num_experts_per_tok,
    output_router_logits=True,  # adds the load-balancing loss
    use_cache=False,
    experts_implementation="grouped_mm",
  )
  model = MixtralForCausalLM(mixtral)
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=cfg.optimizer.learning_rate,
    betas=(cfg.optimizer.adam_b1, cfg.optimizer.adam_b2),
    weight_decay=cfg.optimizer.adam_weight_decay,
  )
  rows = int(cfg.data.per_device_batch_size)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, model_cfg.vocab_size, (rows, length))
  tokens_BT = torch.from_numpy(tokens)

  def step() -> float:
    optimizer.zero_grad()
    loss = model(tokens_BT, labels=tokens_BT).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optimizer.gradient_clipping_threshold)
    optimizer.step()
    return loss.item()

  return step
