"""QK-clip: logits of a batch, measured before and after a step, head by head."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import trees
from support.slow_cases import fast_only
from support.tiny import build, config_of, mesh_keys, place, state_on, take_steps, uneven_batch
from support.tiny_run import Output, last_manifest, logged, start

from maxlite.errors import UserError
from maxlite.optim.labels import path_of
from maxlite.training.loss import run_forward
from maxlite.training.qk_clip import by_attention, scale_logits

LATENT = {
  "decoder_block": "deepseek",
  "q_lora_rank": 8,
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 4,
  "qk_rope_head_dim": 2,
  "v_head_dim": 4,
}
MODELS = {
  "grouped": {"decoder_block": "llama"},
  "own keys": {"decoder_block": "llama", "base_num_kv_heads": 4},
  "biases": {"decoder_block": "qwen2", "base_num_kv_heads": 4},
  "latent": LATENT,
  "latent without a query latent": LATENT | {"q_lora_rank": 0},
  "windows": {"decoder_block": "gpt_oss", "sliding_window_size": 3, "base_num_decoder_layers": 2},
  "scanned windows": {
    "decoder_block": "gpt_oss",
    "sliding_window_size": 3,
    "base_num_decoder_layers": 4,
    "scan_layers": True,
  },
  "scanned": {"decoder_block": "llama", "scan_layers": True, "base_num_decoder_layers": 2},
  "multi-token prediction": LATENT | {"mtp_num_layers": 1},
}
MESH = mesh_keys("fsdp=4 tensor=2")
BATCH = uneven_batch(0)


def with_large_heads(params, seed=0):
  """Queries of some heads are so large that their logits reach 30, and those of others are not."""
  draw = np.random.default_rng(seed)

  def enlarge(key_path, leaf):
    if not re.search(r"attention/query/(kernel|bias)$", path_of(key_path)):
      return leaf
    sizes_H = draw.permutation([1.0, 1.0, 40.0, 120.0])[: leaf.shape[-2]].astype(leaf.dtype)
    return leaf * sizes_H[:, None].reshape(*[1] * (leaf.ndim - 2), -1, 1)

  return jax.tree.map_with_path(enlarge, params)


@functools.cache
def measured_by(program):
  def measure(params, batch):
    has_drafts = program.spec.model.mtp_num_layers > 0
    result = run_forward(
      program.model, params, batch, None, drafts=has_drafts, measures_logits=True
    )
    return by_attention(result.max_logits)

  return jax.jit(measure)


def max_logits(program, state):
  """{attention: max_H} of BATCH, by the model's own measurement."""
  placed = state_on(program, state)
  return jax.device_get(measured_by(program)(placed.params, place(program, BATCH)))


def threshold_between(logits):
  """A threshold that some heads are above and some below."""
  flat = np.sort(np.concatenate([each.reshape(-1) for each in logits.values()]))
  assert flat[-1] > 4 * flat[0]
  return float(round(np.sqrt(flat[0] * flat[-1]), 3))


def clipped(model, mesh=None, **keys):
  """(threshold, logits before, logits after, state before, after, row) of a step of rate 0."""
  keys = MODELS[model] | (mesh or MESH) | keys
  measuring = build(config_of(**keys, learning_rate=0, qk_clip_threshold=1e6))
  before = jax.device_get(measuring.init(0))
  before = before.replace(params=with_large_heads(before.params))
  logits = max_logits(measuring, before)
  threshold = threshold_between(logits)
  program = build(config_of(**keys, learning_rate=0, qk_clip_threshold=threshold))
  after, (row,) = take_steps(program, before, [BATCH])
  return threshold, logits, max_logits(measuring, after), before, after, row


@pytest.mark.parametrize("model", fast_only(MODELS, "own keys", "latent"))
def test_logits_above_the_threshold_are_clipped_to_it(model):
  """On the same batch; other heads compute what they did, and nothing else is changed."""
  threshold, logits, after_step, before, after, row = clipped(model)
  num_clipped = sum(np.sum(max_H > threshold) for max_H in logits.values())
  first = next(iter(logits))  # later layers get other inputs
  got, expected = (each[first].reshape(-1, 4)[0] for each in (after_step, logits))
  np.testing.assert_allclose(got, np.minimum(expected, threshold), rtol=1e-4)
  assert row["clipped_heads"] == num_clipped > 0
  np.testing.assert_allclose(row["max_logits"], max(map(np.max, logits.values())), rtol=1e-6)
  for (key_path, old), new in zip(
    jax.tree.leaves_with_path(before.params), jax.tree.leaves(after.params), strict=True
  ):
    path = path_of(key_path)
    if not re.search(r"attention/(query|key|kv_up)/", path):
      np.testing.assert_array_equal(new, old, err_msg=path)
      continue
    if "kv_up" in path:
      num_plain = MODELS[model]["qk_nope_head_dim"]
      np.testing.assert_array_equal(new[..., num_plain:], old[..., num_plain:], err_msg="values")
    max_H = logits[path.split("/attention/")[0] + "/attention"]
    is_same_H = np.all(new == old, axis=-1)
    if path.endswith("kernel"):
      is_same_H = np.all(is_same_H, axis=-2)
    if is_same_H.shape == max_H.shape:
      np.testing.assert_array_equal(is_same_H[max_H <= threshold], True, err_msg=path)


def logits_by_numpy(program, params):
  """max_H of the only layer of a llama without rotation at its first document, in float64."""
  cfg = program.spec.model
  layer = params["layers_0"]
  x = np.asarray(params["embed"]["embedding"], np.float64)[BATCH.tokens_BT]
  x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + cfg.normalization_layer_epsilon)
  x = x * layer["attention_norm"]["scale"]
  q, k = (
    np.einsum("btd,dhc->bthc", x, layer["attention"][name]["kernel"]) for name in ("query", "key")
  )
  half = cfg.head_dim // 2
  angle = BATCH.position_BT[..., None] * float(cfg.rope.rope_max_timescale) ** (
    -np.arange(half) / half
  )
  cos, sin = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]

  def rotate(y):
    first, second = y[..., :half], y[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

  score = np.einsum("bthc,bshc->bhts", rotate(q), rotate(k)) * cfg.head_dim**-0.5
  segment = BATCH.segment_BT
  same = (segment[:, :, None] == segment[:, None]) & (segment[:, :, None] > 0)
  causal = np.tril(np.ones(score.shape[-2:], bool))
  return np.where((same & causal)[:, None], score, -np.inf).max(axis=(0, 2, 3))


@pytest.mark.parametrize("mesh", fast_only(["fsdp=2 context=2 tensor=2", "fsdp=8"], "fsdp=8"))
def test_the_measured_logits_are_those_of_the_documents(mesh):
  """Against numpy: only pairs of a document, none of the future, none of padding."""
  program = build(config_of(**MODELS["own keys"], **mesh_keys(mesh)))
  before = jax.device_get(program.init(0))
  before = before.replace(params=with_large_heads(before.params))
  (got,) = max_logits(program, before).values()
  np.testing.assert_allclose(got, logits_by_numpy(program, before.params), rtol=1e-4)


def test_logits_below_zero_and_no_logits_at_all_do_not_scale():
  """A largest logit of 0 or less has no root (Megatron #7382)."""
  params = {
    "attention": {
      "query": {"kernel": jnp.ones((2, 3, 4))},
      "key": {"kernel": jnp.ones((2, 3, 4))},
    }
  }
  factors = {"attention": jnp.array([1.0, 0.25, 1.0])}
  scaled = scale_logits(params, factors, 0)
  np.testing.assert_array_equal(scaled["attention"]["query"]["kernel"][0, :, 0], [1, 0.5, 1])
  np.testing.assert_array_equal(scaled["attention"]["key"]["kernel"][0, :, 0], [1, 0.5, 1])


def test_heads_with_negative_logits_keep_their_weights(program_of):
  """Keys that are the opposites of queries: every logit of a position with itself is negative."""
  keys = {"decoder_block": "llama", "base_num_kv_heads": 4, "learning_rate": 0}
  program = program_of(**keys, qk_clip_threshold=0.5, **MESH)
  before = jax.device_get(program.init(0))
  query = before.params["layers_0"]["attention"]["query"]["kernel"]
  signs = np.array([30, -30, 0, -1e-20], np.float32)[:, None]
  before.params["layers_0"]["attention"]["key"]["kernel"] = query * signs
  # One token per document, so that a logit is that of a position with itself.
  tokens_BT = BATCH.tokens_BT
  position_BT = np.zeros_like(BATCH.position_BT)
  segment_BT = np.broadcast_to(
    np.arange(1, 1 + tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape
  )
  batch = BATCH.replace(position_BT=position_BT, segment_BT=segment_BT)
  after, (row,) = take_steps(program, before, [batch])
  assert np.isfinite(row["max_logits"])
  assert row["clipped_heads"] == 1
  for name in ("query", "key"):
    old = before.params["layers_0"]["attention"][name]["kernel"]
    new = after.params["layers_0"]["attention"][name]["kernel"]
    np.testing.assert_array_equal(new[:, 1:], old[:, 1:])
    assert np.abs(new[:, 0]).max() < np.abs(old[:, 0]).max()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["grouped", "latent"])
@pytest.mark.parametrize(
  ("mesh", "accumulation"), [("tensor=2 data=2 context=2", 4), ("fsdp=8", 1), ("data=8", 2)]
)
def test_steps_do_not_depend_on_mesh_and_micro_batches(model, mesh, accumulation):
  keys = MODELS[model] | {"qk_clip_threshold": 0.7, "ema_decay": 0.5}
  whole = build(config_of(**keys, **MESH))
  before = jax.device_get(whole.init(0))
  before = before.replace(params=with_large_heads(before.params))
  batches = [uneven_batch(seed) for seed in range(3)]
  want, expected = take_steps(whole, before, batches)
  keys |= mesh_keys(mesh) | {"gradient_accumulation_steps": accumulation}
  got, rows = take_steps(build(config_of(**keys)), before, batches)
  for row, expected_row in zip(rows, expected, strict=True):
    assert row["clipped_heads"] == expected_row["clipped_heads"] > 0
    np.testing.assert_allclose(row["max_logits"], expected_row["max_logits"], rtol=1e-3)
  for one, other in trees.leaf_pairs(got.params, want.params):
    np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)


def test_a_high_threshold_changes_no_bit(program_of):
  keys = MODELS["own keys"] | MESH
  plain, measuring = program_of(**keys), program_of(**keys, qk_clip_threshold=1e6)
  before = jax.device_get(plain.init(0))
  want, rows = take_steps(plain, before, [BATCH])
  got, (row,) = take_steps(measuring, before, [BATCH])
  trees.assert_equal_leaves(got, want)
  assert "max_logits" not in rows[0]
  assert row["clipped_heads"] == 0


@pytest.mark.slow
def test_skipped_steps_do_not_clip(program_of):
  program = program_of(**MODELS["latent"], **MESH, qk_clip_threshold=0.1)
  before = jax.device_get(program.init(0))
  before = before.replace(params=with_large_heads(before.params))
  bad = BATCH.replace(weight_BT=np.where(BATCH.weight_BT > 0, np.nan, 0).astype(np.float32))
  after, (row,) = take_steps(program, before, [bad])
  assert row["clipped_heads"] > 0
  trees.assert_equal_leaves(after.params, before.params)


@pytest.mark.slow
@pytest.mark.parametrize(
  "variant",
  [
    {},
    {
      "diloco_sync_period": 2,
      "gradient_accumulation_steps": 1,
      "ema_decay": 0,
      **mesh_keys("ensemble=2 fsdp=4"),
    },
  ],
)
def test_a_resumed_run_clips_the_same(tmp_path, variant):
  keys = {"decoder_block": "llama", "qk_clip_threshold": 0.01, "eval_interval": -1, **variant}
  start(tmp_path / "whole", **keys)
  start(tmp_path / "parts", Output(at=5), **keys)
  start(tmp_path / "parts", **keys)
  rows = logged(tmp_path / "parts")
  assert rows == logged(tmp_path / "whole")
  assert last_manifest(tmp_path / "parts") == last_manifest(tmp_path / "whole")
  assert rows[-1]["clipped_heads"] > 0


@pytest.mark.parametrize(
  ("keys", "error"),
  [
    ({"decoder_block": "qwen3"}, "qk_clip_threshold=0"),
    ({"decoder_block": "llama", "attn_logits_soft_cap": 30}, "attn_logits_soft_cap=0"),
    ({"decoder_block": "llama", "lora_rank": 2}, "lora_rank=0"),
    (
      {"decoder_block": "llama", "phases": "[{name: a, train: [.*], steps: 1}]"},
      "qk_clip_threshold=0",
    ),
  ],
)
def test_what_is_not_clipped_is_refused(keys, error):
  with pytest.raises(UserError, match=error):
    config_of(**keys, qk_clip_threshold=100)
