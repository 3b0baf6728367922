"""FLOPs of a training step of a phase, which trains some of the parameters."""

import re
from collections.abc import Collection, Mapping

from maxlite.config.schema import ModelConfig
from maxlite.metrics.flops import FLOPS_PER_MAC, TRAIN_OVER_FORWARD, train_flops_per_step

# In forward order; an unscanned stack includes its numbered layers.
STAGES = ("embed", "dense_layers", "layers", "final_norm", "draft_head", "unembed")
STACKS = ("dense_layers", "layers")
MATRIX = r".*(/kernel|moe/w[io](_\d)?)"  # paths of matrices that tokens are multiplied with
EXPERT = r".*moe/w[io](_\d)?"


def phase_flops(
  model: ModelConfig,
  tokens: int,
  row_length: int,
  sizes: Mapping[str, int],
  trained: Collection[str],
  *,
  logits: bool = True,
  drafts: bool = False,
) -> float:
  """FLOPs of one step on `tokens` tokens that trains the parameters `trained`.

  Counts what `train_flops_per_step` counts, and equals it if all parameters are trained: a forward
  product, one for the gradient of each trained matrix, and one for the gradient of each input that
  depends on a trained parameter. Gradients flow through frozen layers: all layers of a stack need
  them if anything in the stack or before it is trained.

  Args:
    sizes: the number of elements of every parameter, by path.
    logits: whether the gradient of the loss flows through the model's own logits.
    drafts: whether the loss uses the draft heads.
  """
  first = min(_stage(path) for path in trained)
  unread = () if drafts else ("draft_head",)
  macs = 0.0
  for path, size in sizes.items():
    if re.fullmatch(MATRIX, path) and path.split("/")[0] not in ("unembed", *unread):
      passes = 1 + _needs_input_gradient(STAGES[_stage(path)], first) + (path in trained)
      macs += passes * size * _share_of_tokens(path, model)
  num_drafts = model.num_draft_heads if drafts else 0
  after = _needs_input_gradient("unembed", first)
  weight = "embed/embedding" if model.logits_via_embedding else "unembed/kernel"
  # A trained embedding makes all later layers need gradients, but its lookup is not a product.
  passes = (1 + logits * (after + (weight in trained))) + num_drafts * (
    1 + after + (weight in trained)
  )
  macs += passes * model.vocab_size * model.base_emb_dim
  return FLOPS_PER_MAC * tokens * macs + _attention(model, tokens, row_length, first)


def _attention(model: ModelConfig, tokens: int, row_length: int, first: int) -> float:
  """FLOPs of attention scores and weighted values, products of two activations."""
  whole = train_flops_per_step(model, tokens, row_length).attention
  num_layers = model.base_num_decoder_layers
  dense = model.moe.first_num_dense_layers / num_layers
  needed = sum(
    share * _needs_input_gradient(stack, first)
    for stack, share in zip(STACKS, (dense, 1 - dense), strict=True)
  )
  return whole * (1 + (TRAIN_OVER_FORWARD - 1) * needed) / TRAIN_OVER_FORWARD


def _stage(path: str) -> int:
  return STAGES.index(re.sub(r"_\d+$", "", path.split("/", maxsplit=1)[0]))


def _needs_input_gradient(stage: str, first: int) -> bool:
  index = STAGES.index(stage)
  return first < index or (stage in STACKS and first == index)


def _share_of_tokens(path: str, model: ModelConfig) -> float:
  is_expert = re.fullmatch(EXPERT, path)
  return model.moe.num_experts_per_tok / model.moe.num_experts if is_expert else 1.0
