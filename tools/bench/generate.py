"""What a token costs: decode tokens/s with a cache against `transformers` on the same weights.

  python tools/bench/generate.py [--rounds 5] [--batch 1 16] [--tokens 128] [--threads 1 2]

A Llama of random weights, 4 layers, 256 wide, 8 heads, vocabulary 512, float32, is written by
`transformers` and read by `maxlite.load`. Both continue the same prompts of 64 tokens greedily, in
turns, round by round, so that a drift of the machine's speed falls on each alike; torch with one
thread, which for so small a model may be faster, and with all it takes by itself, or as --threads
says. Figures are the best of all rounds, and time to the first token is left out. Needs
`pip install -e .[hf]`.
"""

import argparse
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import maxlite
from maxlite.generation.batcher import Batcher
from maxlite.generation.engine import Engine, Request
from maxlite.generation.sampling import Rules
from maxlite.generation.weights import inference_model, inference_params

NUM_PROMPT, VOCAB = 64, 512
SHAPE = LlamaConfig(
  vocab_size=VOCAB,
  hidden_size=256,
  intermediate_size=1024,
  num_hidden_layers=4,
  num_attention_heads=8,
  num_key_value_heads=8,
  max_position_embeddings=2048,
)

# (seconds per step, tokens of the first row)
Run = Callable[[], tuple[float, list[int]]]


def ours(folder: str, prompts_BT: np.ndarray, num_tokens: int) -> Run:
  loaded, params = maxlite.load(folder)
  engine = Engine(
    inference_model(loaded.cfg, loaded.sharder),
    inference_params(loaded.cfg, params),
    num_rows=len(prompts_BT),
    max_length=NUM_PROMPT + num_tokens,
    ends=[VOCAB],  # no token: texts do not end
  )

  def run() -> tuple[float, list[int]]:
    requests = [Request(row.tolist(), num_tokens, Rules(temperature=0.0)) for row in prompts_BT]
    batcher = Batcher(engine)
    events = batcher.add(requests)
    while not batcher.is_idle:
      events += batcher.step()
    tokens = [event.token for event in events if event.request is requests[0]]
    return batcher.meter.decode_seconds / (num_tokens - 1), tokens

  return run


def theirs(folder: str, prompts_BT: np.ndarray, num_tokens: int, num_threads: int) -> Run:
  model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  tokens_BT = torch.from_numpy(prompts_BT)

  def seconds(num: int) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    text = model.generate(
      tokens_BT,
      attention_mask=torch.ones_like(tokens_BT),
      max_new_tokens=num,
      min_new_tokens=num,
      do_sample=False,
      pad_token_id=0,
      eos_token_id=None,
    )
    return time.perf_counter() - start, text

  @torch.inference_mode()
  def run() -> tuple[float, list[int]]:
    torch.set_num_threads(num_threads)
    first, _ = seconds(1)
    whole, text_BT = seconds(num_tokens)
    return (whole - first) / (num_tokens - 1), text_BT[0, NUM_PROMPT:].tolist()

  return run


def measure(
  folder: str, num_rows: int, num_tokens: int, rounds: int, threads: list[int]
) -> tuple[dict, bool]:
  """({candidate: best seconds per step}, whether all wrote the same)."""
  prompts_BT = np.random.default_rng(0).integers(VOCAB, size=(num_rows, NUM_PROMPT))
  candidates = {"maxlite": ours(folder, prompts_BT, num_tokens)}
  for num_threads in threads:
    name = f"transformers, {num_threads} thread{'s' * (num_threads > 1)}"
    candidates[name] = theirs(folder, prompts_BT, num_tokens, num_threads)
  texts = {name: run()[1] for name, run in candidates.items()}  # also compiles
  best = dict.fromkeys(candidates, float("inf"))
  for _ in range(rounds):
    for name, run in candidates.items():
      best[name] = min(best[name], run()[0])
  return best, all(text == texts["maxlite"] for text in texts.values())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
  parser.add_argument("--tokens", type=int, default=128)
  threads = sorted({1, torch.get_num_threads()})
  parser.add_argument("--threads", type=int, nargs="+", default=threads)
  args = parser.parse_args()
  table = Table("batch", "candidate", "ms per step", "tokens/s", "maxlite is")
  with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    LlamaForCausalLM(SHAPE).save_pretrained(folder)
    for num_rows in args.batch:
      best, same = measure(folder, num_rows, args.tokens, args.rounds, args.threads)
      for name, seconds in best.items():
        ratio = "" if name == "maxlite" else f"{seconds / best['maxlite']:.1f} x as fast"
        row = (num_rows, name, f"{seconds * 1e3:.2f}", f"{num_rows / seconds:,.0f}", ratio)
        table.add_row(*map(str, row))
      table.caption = "greedy tokens are the same" if same else "greedy tokens differ"
  Console().print(table)


if __name__ == "__main__":
  main()
