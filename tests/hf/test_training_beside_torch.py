"""Imported models trained beside torch, on the same batches, have its losses and gradient norms."""

import contextlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hf_measure import loss_of
from support.needs import needs_transformers

import maxlite
from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.hf.conversion import from_hf

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "fixtures"))
STEPS = 20
NUM_DEVICES = 8
# With a ten times larger one, the weights reach a region in which the gradient norm of torch itself
# changes by 1e-4 if the first weights change by one rounding error (docs/models.md).
LEARNING_RATE = 1e-3
KEYS = {
  "steps": STEPS,
  "learning_rate": LEARNING_RATE,
  "lr_schedule_type": "constant",
  "warmup_steps_fraction": 0.0,
  "adam_b1": 0.9,
  "adam_b2": 0.95,
  "adam_eps": 1e-8,
  "adam_weight_decay": 0.1,
  "gradient_clipping_threshold": 1.0,
  # Without what transformers does not have.
  "z_loss_multiplier": 0.0,
  "max_target_length": 14,
  "per_device_batch_size": 3,
  "ici_data_parallelism": NUM_DEVICES,
  "ici_fsdp_parallelism": 1,
  # Fastest to compile; other tests compare them with the rest.
  "attention": "reference",
  "scan_unroll": 1,
}
MOE_KEYS = {
  "load_balance_loss_weight": 0.0,
  "router_z_loss_weight": 0.0,
  "routed_bias_update_rate": 0.0,
  "sparse_matmul": False,
}

needs_torch = needs_transformers


def imported(folder, root):
  """The run that `from_hf` creates."""
  argv = [f"base_output_directory={root}", "run_name=run", "dataset_type=synthetic"]
  with contextlib.redirect_stdout(io.StringIO()):
    from_hf(str(folder), argv)
  return root / "run"


def batch_of(hf_parity, step):
  """The batch of a step: packed documents in rows for every device."""
  parts = [hf_parity.batch(NUM_DEVICES * step + device) for device in range(NUM_DEVICES)]
  batch = {}
  for name in parts[0]:
    batch[name] = hf_parity.torch.cat([part[name] for part in parts])
  return batch


@pytest.mark.hf
@needs_torch
@pytest.mark.parametrize(
  "model_type",
  [
    "llama",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek_v3", "mixtral", "gpt_oss")),
  ],
)
def test_losses_and_gradient_norms_of_twenty_steps(model_type, tmp_path):
  import hf_parity

  model = hf_parity.build(model_type, seed=0)
  hf_parity.save(model, tmp_path / "model")
  batches = [batch_of(hf_parity, step) for step in range(STEPS)]
  keys = KEYS
  if model_type != "llama":
    keys = KEYS | MOE_KEYS
  run = maxlite.open_run(imported(tmp_path / "model", tmp_path), **keys)
  ours = [maxlite.Batch.of(batch["tokens_BT"], batch["segment_BT"]) for batch in batches]
  _, rows = run.train_on(ours)
  theirs = hf_parity.train(model, batches, LEARNING_RATE)
  np.testing.assert_allclose([row["loss"] for row in rows], theirs["loss"], rtol=1e-5)
  np.testing.assert_allclose([row["grad_norm"] for row in rows], theirs["grad_norm"], rtol=2e-5)


@pytest.mark.hf
@needs_torch
def test_the_embedding_of_the_pad_token_alone_has_another_gradient(tmp_path):
  import hf_parity

  pad = 7
  data = hf_parity.batch(0)
  data["tokens_BT"][0, 2] = pad
  gradients = {}
  for padding_idx in (None, pad):
    model = hf_parity.build("llama", seed=0)
    model.model.embed_tokens.padding_idx = padding_idx
    hf_parity.loss_of(hf_parity.logits_of(model, data), data).backward()
    gradients[padding_idx] = {name: x.grad.numpy() for name, x in model.named_parameters()}
  hf_parity.save(model, tmp_path / "model")
  decoder, params = maxlite.load(tmp_path / "model")
  batch = [data[name].numpy() for name in ("tokens_BT", "segment_BT", "position_BT")]

  def loss(params):
    return loss_of(SimpleNamespace(model=decoder.decoder), params, batch)[0]

  ours = leaves_by_path(jax.jit(jax.grad(loss))(params))
  assert not gradients[pad]["model.embed_tokens.weight"][pad].any()
  np.testing.assert_allclose(
    ours["embed/embedding"], gradients[None]["model.embed_tokens.weight"], atol=1e-6
  )
  for name, gradient in gradients[pad].items():
    expected = gradients[None][name].copy()
    if name == "model.embed_tokens.weight":
      expected[pad] = 0
    np.testing.assert_allclose(gradient, expected, atol=1e-7, err_msg=name)
