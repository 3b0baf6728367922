"""Export a run and compare loss and greedy decoding between `transformers` and maxlite.

python tools/inspect/hf_agreement.py run_name=NAME [key=value ...]

The loss is computed on the first rows of the run's held-out data; `prompt` is completed greedily.
Needs `pip install -e .[hf]`.
"""

import functools
import sys
import tempfile
from collections.abc import Callable

import jax
import numpy as np
import torch
import transformers

import maxlite
from maxlite.config import Config
from maxlite.data.batch import Batch
from maxlite.data.tokenizer import encode_prompt, open_tokenizer
from maxlite.hf.conversion import to_hf
from maxlite.runs.open_run import open_run_data, open_trained
from maxlite.runs.saved_run import config_of_run, run_folder

Apply = Callable[..., jax.Array]  # the model with its parameters: tokens -> logits


def main() -> None:
  transformers.utils.logging.disable_progress_bar()
  argv = ["max_new_tokens=100", *sys.argv[1:]]
  cfg = config_of_run(argv)
  with tempfile.TemporaryDirectory() as root:
    to_hf([*argv, f"output_path={root}/out"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{root}/out")
  model, params = maxlite.load(run_folder(cfg).directory)
  apply = functools.partial(jax.jit(model.apply), params)
  prompt = cfg.generate.prompt
  ids = tokenizer(prompt)["input_ids"]
  own = open_tokenizer(cfg.data)
  assert ids == encode_prompt(own, prompt.encode()), "tokenizers differ"

  compare_losses(first_batch(cfg), apply, theirs)
  length = len(ids) + cfg.generate.max_new_tokens
  completed = complete(apply, ids, length)
  generated = complete_by_transformers(theirs, ids, length)
  print(f"greedy completion of {prompt!r}: equal: {generated == completed}")
  print(tokenizer.decode(generated, skip_special_tokens=True))


def first_batch(cfg: Config) -> Batch:
  """The first batch of the run's held-out data."""
  program, _ = open_trained(cfg)
  return next(iter(open_run_data(cfg, program).eval_batches(1)))


def compare_losses(
  batch: Batch,
  apply: Apply,
  theirs: transformers.PreTrainedModel,
) -> None:
  """Print the mean loss of both models on a batch."""
  ours_BTV = apply(
    batch.tokens_BT,
    segment_ids=batch.segment_BT,
    positions=batch.position_BT,
  )
  with torch.no_grad():
    theirs_BTV = theirs(
      input_ids=to_torch(batch.tokens_BT).long(),
      position_ids=to_torch(batch.position_BT).long(),
      use_cache=False,
    ).logits
  is_target = to_torch(batch.weight_BT).flatten() > 0
  targets = to_torch(batch.targets_BT).long().flatten()[is_target]
  for name, logits_BTV in (("maxlite", to_torch(ours_BTV)), ("transformers", theirs_BTV)):
    logits = logits_BTV.flatten(0, 1)[is_target]
    loss = torch.nn.functional.cross_entropy(logits, targets)
    print(f"{name}: loss {loss:.6f} of {len(targets)} tokens")


def to_torch(array: jax.Array) -> torch.Tensor:
  return torch.tensor(np.asarray(array))


def complete(
  apply: Apply,
  ids: list[int],
  length: int,
) -> list[int]:
  """Tokens of a greedy completion to `length`, without a cache."""
  tokens = list(ids)
  for n in range(len(ids), length):
    row = np.zeros((1, length), np.int32)
    row[0, :n] = tokens
    logits_BTV = apply(row)
    tokens.append(int(np.argmax(logits_BTV[0, n - 1])))
  return tokens


def complete_by_transformers(
  model: transformers.PreTrainedModel,
  ids: list[int],
  length: int,
) -> list[int]:
  with torch.no_grad():
    rows = model.generate(
      torch.tensor([ids]),
      max_length=length,
      do_sample=False,
      eos_token_id=None,
      pad_token_id=0,
    )
  return rows[0].tolist()


if __name__ == "__main__":
  main()
