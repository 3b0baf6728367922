"""Loss, rewards and gradients of `dpo` beside TRL, from one file of preference pairs."""

import dataclasses
import json
from importlib.util import find_spec

import jax
import numpy as np
import pytest
import tokenizers
from support import trees
from support.tiny import build
from tokenizers import decoders, models, pre_tokenizers, trainers

import maxlite
from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.config import load_config
from maxlite.data.batch import Batch
from maxlite.runs.open_run import open_run_data
from maxlite.step.gradients import StepInputs
from maxlite.training.program import build_objective_parts

# An answer ends with the eos token, so both packages give weight to the same tokens.
TEMPLATE = (
  "{{ bos_token }}{% for message in messages %}"
  "{% if message.role == 'user' %}{{ '[' + message.content + ']' }}"
  "{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
BETA = 0.3
NUM_PAIRS = 6
SIZES = {
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 128,
  "tie_word_embeddings": False,
}


def pair_of(n):
  """A pair of answers to a prompt; every second prompt has an earlier answer."""
  chosen = [{"role": "assistant", "content": f"{n} and {n}"}]
  rejected = [{"role": "assistant", "content": "no" * (n + 1)}]
  prompt = [{"role": "user", "content": f"what is {n}?"}]
  if n % 2:
    prompt = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}, *prompt]
  return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def save_tokenizer(folder):
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=280,
    special_tokens=list(SPECIAL.values()),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(["what is 3 and 4? no"] * 3, trainer)
  tokenizer.save(str(folder / "tokenizer.json"))
  settings = SPECIAL | {"chat_template": TEMPLATE}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def build_torch(seed):
  """A tiny model with random weights."""
  import torch
  import transformers

  torch.manual_seed(seed)
  cfg = transformers.LlamaConfig(vocab_size=280, attn_implementation="eager", **SIZES)
  model = transformers.LlamaForCausalLM(cfg).float()
  for weight in model.parameters():
    weight.data = weight.data + 0.2 * torch.randn_like(weight)
  return model


def losses_of_trl(folder, policy, reference, pairs):
  """The metrics of TRL on all pairs; it leaves the gradients in `policy`."""
  import datasets
  import transformers
  import trl

  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(folder / "tokenizer.json"), chat_template=TEMPLATE, **SPECIAL
  )
  args = trl.DPOConfig(
    output_dir=str(folder / "trl"),
    beta=BETA,
    use_cpu=True,
    bf16=False,
    fp16=False,
    gradient_checkpointing=False,
    report_to=[],
    per_device_train_batch_size=len(pairs),
  )
  trainer = trl.DPOTrainer(
    model=policy,
    ref_model=reference,
    args=args,
    train_dataset=datasets.Dataset.from_list(pairs),
    processing_class=tokenizer,
  )
  examples = [trainer.train_dataset[n] for n in range(len(pairs))]
  loss = trainer.compute_loss(policy, trainer.data_collator(examples))
  loss.backward()
  metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
  return metrics | {"loss": loss.item()}


def our_step(folder, packing):
  """(metrics, gradients) of the model in `policy` on all pairs, in one batch."""
  model, params = maxlite.load(folder / "policy")
  keys = {
    "loss_type": "dpo",
    "dpo_beta": BETA,
    "reference_path": folder / "reference",
    "dataset_type": "preference",
    "dataset_path": folder / "pairs.jsonl",
    "tokenizer_type": "huggingface",
    "tokenizer_path": folder / "tokenizer.json",
    "vocab_size": 280,
    "max_target_length": 96,
    "packing": packing,
    "eval_fraction": 0,
    "per_device_batch_size": NUM_PAIRS,
    "token_cache_directory": folder / "cache",
    "sharding_tolerance": 1,
    "jax_cache_dir": "",
  }
  cfg = load_config([f"{key}={value}" for key, value in keys.items()])
  cfg = dataclasses.replace(cfg, model=model.cfg)
  program = build(cfg, jax.devices()[:1])
  rows = open_run_data(cfg, program).source.train
  padding = {name: np.zeros_like(row) for name, row in rows[0].items()}
  filled = [rows[n] for n in range(len(rows))]
  filled += [padding] * (NUM_PAIRS - len(rows))
  assert (len(rows) < NUM_PAIRS) == packing
  batch = Batch(**trees.stack(filled))
  inputs = program.with_extra_inputs(program.place(batch))
  assert isinstance(inputs, StepInputs)
  step = jax.jit(build_objective_parts(program, program.objectives[0]).gradients)
  result = step(params, None, inputs, jax.random.key(0))
  return result.metrics, result.gradients


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
  not (find_spec("torch") and find_spec("transformers") and find_spec("trl")),
  reason="needs torch, transformers and TRL: pip install -e .[hf,trl]",
)
def test_loss_rewards_and_gradients_equal_those_of_trl(tmp_path):
  from safetensors.torch import save_file

  policy = build_torch(0)
  reference = build_torch(1)
  for name, model in (("policy", policy), ("reference", reference)):
    model.save_pretrained(tmp_path / name)
  save_tokenizer(tmp_path)
  pairs = [pair_of(n) for n in range(NUM_PAIRS)]
  (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
  expected = losses_of_trl(tmp_path, policy, reference, pairs)
  gradients = {name: weight.grad.contiguous() for name, weight in policy.named_parameters()}
  (tmp_path / "gradients").mkdir()
  config = (tmp_path / "policy" / "config.json").read_text()
  (tmp_path / "gradients" / "config.json").write_text(config)
  save_file(gradients, tmp_path / "gradients" / "model.safetensors")
  _, expected_gradients = maxlite.load(tmp_path / "gradients")
  names = [name for name in expected if name == "loss" or name.startswith(("rewards/", "logps/"))]
  assert len(names) == 7
  assert 0 < expected["rewards/accuracies"] < 1
  for packing in (True, False):
    metrics, found = our_step(tmp_path, packing)
    for name in names:
      np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, err_msg=name)
    found = leaves_by_path(found)
    for path, gradient in leaves_by_path(expected_gradients).items():
      scale = np.abs(gradient).max()
      np.testing.assert_allclose(found[path], gradient, atol=1e-5 * scale, err_msg=path)
