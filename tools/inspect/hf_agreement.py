"""Export a run and compare loss and greedy decoding between `transformers` and maxlite.

python tools/inspect/hf_agreement.py run_name=NAME [key=value ...]

The loss is computed on the first rows of the run's held-out data; `prompt` is completed greedily.
Needs `pip install -e .[hf]`.
"""

import sys
import tempfile

import jax
import numpy as np
import torch
import transformers

import maxlite
from maxlite.data.tokenizer import open_tokenizer
from maxlite.hf.conversion import to_hf
from maxlite.runs.open_run import open_trained, open_trainer_data
from maxlite.runs.saved_run import config_of_run, run_folder


def main() -> None:
  transformers.utils.logging.disable_progress_bar()
  argv = ["max_new_tokens=100", *sys.argv[1:]]
  cfg = config_of_run(argv)
  with tempfile.TemporaryDirectory() as root:
    to_hf("", [*argv, f"output_path={root}/out"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{root}/out")
  model, params = maxlite.load(run_folder(cfg).directory)
  apply = jax.jit(model.apply)
  ids = tokenizer(cfg.generate.prompt)["input_ids"]
  own = open_tokenizer(cfg.data)
  assert ids == [own.bos, *own.encode(cfg.generate.prompt.encode())], "tokenizers differ"

  trainer, _ = open_trained(cfg)
  batch = next(iter(open_trainer_data(trainer).eval_batches(1)))
  tokens_BT, targets_BT = batch.tokens_BT, np.where(batch.weight_BT > 0, batch.targets_BT, -100)
  segments = {"segment_ids": batch.segment_BT, "positions": batch.position_BT}
  ours_BTV = torch.tensor(np.asarray(apply(params, tokens_BT, **segments)))
  with torch.no_grad():
    positions = torch.tensor(np.asarray(batch.position_BT)).long()
    theirs_BTV = theirs(
      input_ids=torch.tensor(np.asarray(tokens_BT)).long(), position_ids=positions, use_cache=False
    ).logits
  targets = torch.tensor(np.asarray(targets_BT)).long().flatten()
  is_target = targets >= 0
  for name, logits_BTV in (("maxlite", ours_BTV), ("transformers", theirs_BTV)):
    logits = logits_BTV.flatten(0, 1)[is_target]
    loss = torch.nn.functional.cross_entropy(logits, targets[is_target])
    print(f"{name}: loss {loss:.6f} of {int(is_target.sum())} tokens")

  tokens = list(ids)
  length = len(ids) + cfg.generate.max_new_tokens
  for n in range(len(ids), length):
    row = np.zeros((1, length), np.int32)
    row[0, :n] = tokens
    tokens.append(int(np.argmax(apply(params, row)[0, n - 1])))
  with torch.no_grad():
    generated = theirs.generate(
      torch.tensor([ids]), max_length=length, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
  print(f"greedy completion of {cfg.generate.prompt!r}: equal: {generated == tokens}")
  print(tokenizer.decode(generated, skip_special_tokens=True))


if __name__ == "__main__":
  main()
