"""Import, fine-tune on conversations, in full and with adapters, and export."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_peft import FIXTURES, converted

import maxlite
from maxlite.config import load_config
from maxlite.runs.run import run_training

pytestmark = pytest.mark.usefixtures("fast_programs")
CONVERSATIONS = [
  {
    "messages": [
      {"role": "user", "content": f"{n}?"},
      {"role": "assistant", "content": f"{n + 1}."},
    ]
  }
  for n in range(12)
]


@pytest.mark.slow
def test_fine_tuned_exports_compute_what_the_runs_do(tmp_path):
  (tmp_path / "conversations.jsonl").write_text(
    "".join(f"{json.dumps(row)}\n" for row in CONVERSATIONS)
  )
  data = (
    "dataset_type=chat",
    f"dataset_path={tmp_path}/conversations.jsonl",
    "chat_template_path=configs/chat/plain.jinja",
    "max_target_length=64",
    "per_device_batch_size=1",
    "eval_fraction=0",
    "sharding_tolerance=1",
    "jax_cache_dir=",
    "steps=2",
  )

  def run(name):
    return (f"run_name={name}", f"base_output_directory={tmp_path}")

  def train(*args):
    return run_training(load_config(args))

  # The vocabulary is extended with zeros to hold byte tokens.
  assert converted("from_hf", FIXTURES / "llama", *run("full"), "vocab_size=320") == 0
  assert train(*run("full"), *data) == 0
  assert converted("to_hf", *run("full"), f"output_path={tmp_path}/base") == 0
  assert converted("from_hf", tmp_path / "base", *run("tuned")) == 0
  assert train("configs/chat/lora.yml", *run("tuned"), *data) == 0
  assert (
    converted("to_peft", tmp_path / "base", *run("tuned"), f"output_path={tmp_path}/adapter") == 0
  )
  assert converted("to_hf", *run("tuned"), f"output_path={tmp_path}/merged") == 0

  tokens_BT = np.arange(40).reshape(2, 20).astype(np.int32)

  def logits(folder):
    return logits_of(tmp_path / folder, tokens_BT)

  np.testing.assert_allclose(logits("merged"), logits("tuned"), atol=1e-5)
  assert np.abs(logits("tuned") - logits("base")).max() > 1e-3
  base, merged = (load_file(tmp_path / f / "model.safetensors") for f in ("base", "merged"))
  before = load_file(FIXTURES / "llama" / "model.safetensors")
  assert all((base[name][: len(was)] != was).any() for name, was in before.items())
  adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
  changed = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in adapters}
  assert {name for name in base if (base[name] != merged[name]).any()} == {
    f"{module}.weight" for module in changed
  }
  config = json.loads((tmp_path / "merged" / "config.json").read_text())
  assert (config["bos_token_id"], config["eos_token_id"]) == (256, 257)
  assert (tmp_path / "merged" / "chat_template.jinja").is_file()


def logits_of(folder, tokens_BT):
  model, params = maxlite.load(folder)
  return np.asarray(jax.jit(model.apply)(params, tokens_BT))
