"""Import, fine-tune on conversations, in full and with adapters, and export."""

import json

import jax
import numpy as np
import pytest
from conversion import converted
from hf_measure import FIXTURES
from safetensors.numpy import load_file

import maxlite
from maxlite.config import load_config
from maxlite.runs.run import run_training

pytestmark = pytest.mark.usefixtures("fast_programs")


def conversation(n):
  return [
    {"role": "user", "content": f"{n}?"},
    {"role": "assistant", "content": f"{n + 1}."},
  ]


@pytest.mark.slow
def test_fine_tuned_exports_compute_what_the_runs_do(tmp_path):
  lines = [json.dumps({"messages": conversation(n)}) for n in range(12)]
  (tmp_path / "conversations.jsonl").write_text("\n".join(lines) + "\n")
  data = [
    "dataset_type=chat",
    f"dataset_path={tmp_path}/conversations.jsonl",
    "chat_template_path=configs/chat/plain.jinja",
    "max_target_length=64",
    "per_device_batch_size=1",
    "eval_fraction=0",
    "sharding_tolerance=1",
    "jax_cache_dir=",
    "steps=2",
  ]
  full = ["run_name=full", f"base_output_directory={tmp_path}"]
  tuned = ["run_name=tuned", f"base_output_directory={tmp_path}"]
  base = tmp_path / "base"

  # The vocabulary is extended with zeros to hold byte tokens.
  assert converted(["from_hf", FIXTURES / "llama", *full, "vocab_size=320"]) == 0
  assert run_training(load_config(full + data)) == 0
  assert converted(["to_hf", *full, f"output_path={base}"]) == 0
  assert converted(["from_hf", base, *tuned]) == 0
  assert run_training(load_config(["configs/chat/lora.yml", *tuned, *data])) == 0
  assert converted(["to_peft", base, *tuned, f"output_path={tmp_path}/adapter"]) == 0
  assert converted(["to_hf", *tuned, f"output_path={tmp_path}/merged"]) == 0

  tokens_BT = np.arange(40).reshape(2, 20).astype(np.int32)

  def logits(folder):
    return logits_of(tmp_path / folder, tokens_BT)

  np.testing.assert_allclose(logits("merged"), logits("tuned"), atol=1e-5)
  assert np.abs(logits("tuned") - logits("base")).max() > 1e-3
  imported_tensors = load_file(FIXTURES / "llama" / "model.safetensors")
  base_tensors = load_file(base / "model.safetensors")
  merged_tensors = load_file(tmp_path / "merged" / "model.safetensors")
  for name, array in imported_tensors.items():
    assert (base_tensors[name][: len(array)] != array).any()
  adapted = set()
  for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"):
    module = name.split(".lora_")[0].removeprefix("base_model.model.")
    adapted.add(f"{module}.weight")
  for name, array in base_tensors.items():
    assert (merged_tensors[name] != array).any() == (name in adapted)
  assert adapted <= base_tensors.keys()
  config = json.loads((tmp_path / "merged" / "config.json").read_text())
  assert config["bos_token_id"] == 256
  assert config["eos_token_id"] == 257
  assert (tmp_path / "merged" / "chat_template.jinja").is_file()


def logits_of(folder, tokens_BT):
  model, params = maxlite.load(folder)
  return np.asarray(jax.jit(model.apply)(params, tokens_BT))
