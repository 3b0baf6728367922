"""A plug-in: a model family, a router, a learning-rate schedule, a loss and a callback.

    python -m maxlite.train configs/base.yml steps=50 plugins=docs/examples/plugin.py \
        decoder_block=sandwich router=sqrt_softmax lr_schedule_type=inverse_sqrt callbacks=norms \
        'phases=[{name: all, train: [.*], loss: confident, steps: 1}]'
"""

import dataclasses
import json

import jax
import jax.numpy as jnp

from maxlite import Callback
from maxlite.config.model_families import MODELS, AttentionForm, ModelFamily, MoeForm
from maxlite.layers.moe.expert_choice import topk_softmax
from maxlite.registry import CALLBACKS, PLAIN_ROUTERS, SCHEDULES, TOKEN_LOSSES
from maxlite.training.loss import NEXT_TOKEN, next_token


def sqrt_softmax(logits_BTE, bias_E, cfg, given_BTK=None):
  """A router whose combine weights are square roots of the usual ones, renormalized."""
  probability_BTE, expert_BTK, weight_BTK = topk_softmax(logits_BTE, bias_E, cfg, given_BTK)
  root_BTK = jnp.sqrt(weight_BTK)
  return probability_BTE, expert_BTK, root_BTK / jnp.sum(root_BTK, axis=-1, keepdims=True)


def inverse_sqrt(cfg, steps):
  """The peak divided by sqrt(n + 1) after n updates."""
  return lambda count: cfg.learning_rate * jax.lax.rsqrt(jnp.float32(1) + count)


def confident(hidden, batch, cfg, sharder):
  """Cross-entropy of logits that are capped at 30."""
  return next_token(hidden.replace(soft_cap=30.0), batch, cfg, sharder)


class Norms(Callback):
  """Writes the gradient norm of each logged step to norms.jsonl in the run folder."""

  def on_start(self, context):
    self._path = context.folder / "norms.jsonl"

  def on_row(self, row):
    with self._path.open("a") as file:
      file.write(json.dumps({"step": row["step"], "grad_norm": row["grad_norm"]}) + "\n")


MODELS["sandwich"] = ModelFamily(AttentionForm(qk_norm="head"), MoeForm(), post_norms=True)
PLAIN_ROUTERS["sqrt_softmax"] = sqrt_softmax
SCHEDULES["inverse_sqrt"] = inverse_sqrt
TOKEN_LOSSES["confident"] = dataclasses.replace(NEXT_TOKEN, sums=confident)
CALLBACKS["norms"] = Norms
