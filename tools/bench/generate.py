"""Benchmark decoding: tokens/s with a cache, against `transformers` on the same weights.

  python tools/bench/generate.py [FOLDER ...] [--rounds 5] [--batch 1 16] [--tokens 128]

Each FOLDER is a model in Hugging Face's format, such as those of tests/hf/hf_fixtures; the default
is a Llama with random weights: 4 layers, width 256, 8 heads, vocabulary 512. `transformers` and
maxlite load the same float32 weights and complete the same prompts of 64 tokens greedily. They
alternate round by round, so that drifts of the machine's speed affect both. torch runs with one
thread, which can be faster for a small model, and with its default number, or with --threads;
maxlite runs on one device, or sharded along `tensor` over the numbers in --tensor. Times are the
best of all rounds without the time to the first token; ratios are to the faster `transformers`.
"matmuls alone" are the matrix products of the Llama's step and nothing else, a lower bound for any
cache. --processor measures CPU time of the process, which other processes disturb less; use it with
one core and thread. Rows of maxlite's cache have as many positions as needed, or --length 2048 as
in a server. Needs `pip install -e .[hf]`.

  python tools/bench/generate.py --run runs/draft_head [--temperature 0.8] [--rounds 5] [...]

compares a run with draft heads with itself, for every number of proposed tokens and for none, on
prompts of Python code completed by --tokens tokens.
"""

import argparse
import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import maxlite
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config, read_saved
from maxlite.config.schema import build
from maxlite.data.tokenizer import open_tokenizer
from maxlite.inference.batcher import Batcher
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import SamplingParams
from maxlite.kernels.xla_cpu import matmul_few_rows

PYTHON = b"def |class |import |    return |for i in |if not |try:\n|# ".split(b"|")
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

Clock = Callable[[], float]
CLOCKS = {False: time.perf_counter, True: time.process_time}  # by --processor
GREEDY = SamplingParams(temperature=0.0)

# Returns (seconds per decoded token of every row, tokens of the first row, tokens per step).
Run = Callable[[], tuple[float, list[int], float]]


def maxlite_run(
  folder: str,
  prompts: list[list[int]],
  num_tokens: int,
  sampling: SamplingParams = GREEDY,
  num_drafts: int = 0,
  length: int = 0,
  clock: Clock = time.perf_counter,
  tensor: int = 1,
) -> Run:
  loaded, params = maxlite.load(folder, mesh={"tensor": tensor})
  engine = Engine(
    inference_model(loaded.cfg, loaded.sharder),
    inference_params(loaded.cfg, params),
    num_rows=len(prompts),
    max_length=length or max(map(len, prompts)) + num_tokens,
    stop_token_ids=[loaded.cfg.vocab_size],  # outside the vocabulary: no completion stops early
    num_drafts=num_drafts,
  )

  def run() -> tuple[float, list[int], float]:
    requests = [
      GenerationRequest(prompt, num_tokens, sampling, seed) for seed, prompt in enumerate(prompts)
    ]
    batcher = Batcher(engine)
    events, start = batcher.add(requests), clock()
    while not batcher.is_idle:
      events += batcher.step()
    seconds = clock() - start
    tokens = [event.token for event in events if event.request is requests[0]]
    return seconds / (num_tokens - 1), tokens, 1 + batcher.throughput.accepted_length

  return run


def transformers_run(
  folder: str, prompts_BT: np.ndarray, num_tokens: int, num_threads: int, clock: Clock
) -> Run:
  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  tokens_BT = torch.from_numpy(prompts_BT)

  @torch.inference_mode()
  def run() -> tuple[float, list[int], float]:
    torch.set_num_threads(num_threads)
    stamps = Timestamps(clock)
    text_BT = model.generate(
      tokens_BT,
      attention_mask=torch.ones_like(tokens_BT),
      max_new_tokens=num_tokens,
      min_new_tokens=num_tokens,
      do_sample=False,
      pad_token_id=0,
      eos_token_id=None,
      streamer=stamps,
    )
    _, first, *_, last = stamps.seconds
    return (last - first) / (num_tokens - 1), text_BT[0, NUM_PROMPT:].tolist(), 1.0

  return run


def matmuls_alone(num_rows: int, num_tokens: int, clock: Clock) -> Run:
  """Run only the matrix products of a decode step, in the layout that is fastest on XLA:CPU."""
  wide, hidden = SHAPE.hidden_size, SHAPE.intermediate_size
  shapes = [*[(wide, wide)] * 4, (wide, hidden), (wide, hidden), (hidden, wide)]
  shapes = [*shapes * SHAPE.num_hidden_layers, (wide, VOCAB)]
  normal = np.random.default_rng(0).standard_normal
  weights = [jnp.asarray(normal(s[::-1]) / s[0] ** 0.5, jnp.float32) for s in shapes]
  matmul = matmul_few_rows

  @jax.jit
  def step(x_BD: jax.Array, weights: list[jax.Array]) -> jax.Array:
    *layers, unembed = weights
    for n in range(0, len(layers), 7):
      q, k, v, out, gate, up, down = layers[n : n + 7]
      x_BD = matmul(matmul(x_BD, q) + matmul(x_BD, k) + matmul(x_BD, v), out)
      x_BD = matmul(matmul(x_BD, gate) + matmul(x_BD, up), down)
    return matmul(x_BD, unembed)

  def run() -> tuple[float, list[int], float]:
    x_BD, start = jnp.ones((num_rows, wide)), clock()
    for _ in range(num_tokens - 1):
      np.asarray(step(x_BD, weights))
    return (clock() - start) / (num_tokens - 1), [], 1.0

  return run


class Timestamps(BaseStreamer):
  """Records when the prompt and each token were processed."""

  def __init__(self, clock: Clock) -> None:
    self._clock, self.seconds = clock, []

  def put(self, value: torch.Tensor) -> None:
    del value
    self.seconds.append(self._clock())

  def end(self) -> None:
    pass


def measure(candidates: dict[str, Run], rounds: int) -> dict[str, float]:
  """Return {candidate: best seconds}, alternating between candidates."""
  best = dict.fromkeys(candidates, float("inf"))
  for _ in range(rounds):
    for name, run in candidates.items():
      best[name] = min(best[name], run()[0])
  return best


@contextlib.contextmanager
def llama() -> Iterator[str]:
  """Create the folder of the default Llama."""
  with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    LlamaForCausalLM(SHAPE).save_pretrained(folder)
    yield folder


def compare_with_transformers(args: argparse.Namespace) -> Table:
  table = Table("model", "batch", "candidate, cores", "ms per step", "tokens/s", "ratio")
  clock, differ = CLOCKS[args.processor], []
  for path in args.folder or [None]:
    with contextlib.nullcontext(path) if path else llama() as folder:
      name = Path(path).name if path else "llama"
      vocab_size = AutoConfig.from_pretrained(folder).vocab_size
      for num_rows in args.batch:
        prompts_BT = np.random.default_rng(0).integers(vocab_size, size=(num_rows, NUM_PROMPT))
        references = {
          f"transformers, {n}": transformers_run(folder, prompts_BT, args.tokens, n, clock)
          for n in args.threads
        }
        ours = functools.partial(maxlite_run, folder, prompts_BT.tolist(), args.tokens, clock=clock)
        candidates = references | {
          f"maxlite, {n}": ours(length=args.length, tensor=n) for n in args.tensor
        }
        completions = [run()[1] for run in candidates.values()]  # also compiles
        if any(tokens != completions[0] for tokens in completions):
          differ.append(f"{name} at batch {num_rows}")
        if not path:
          candidates["matmuls alone"] = matmuls_alone(num_rows, args.tokens, clock)
          candidates["matmuls alone"]()
        best = measure(candidates, args.rounds)
        fastest = min(best[reference] for reference in references)
        for candidate, seconds in best.items():
          ratio = "" if candidate in references else f"{fastest / seconds:.1f}"
          figures = (f"{seconds * 1e3:.2f}", f"{num_rows / seconds:,.0f}", ratio)
          table.add_row(name, str(num_rows), candidate, *figures)
  table.caption = f"greedy tokens {'differ: ' + ', '.join(differ) if differ else 'are the same'}"
  return table


def compare_drafts(args: argparse.Namespace) -> Table:
  cfg: Config = build(Config, read_saved(RunFolder(args.run).config))
  tokenizer = open_tokenizer(cfg.data)
  prompts = [[tokenizer.bos, *map(int, tokenizer.encode(text))] for text in PYTHON]
  sampling = SamplingParams(temperature=args.temperature)
  table = Table("batch", "drafts", "tokens per step", "ms per token", "tokens/s", "speed-up")
  for num_rows in args.batch:
    rows = [prompts[n % len(prompts)] for n in range(num_rows)]
    candidates = {
      str(n): maxlite_run(args.run, rows, args.tokens, sampling, n)
      for n in range(cfg.model.num_draft_heads + 1)
    }
    tokens_per_step = {name: run()[2] for name, run in candidates.items()}  # also compiles
    best = measure(candidates, args.rounds)
    for name, seconds in best.items():
      speed = (f"{seconds * 1e3:.2f}", f"{num_rows / seconds:,.0f}")
      table.add_row(
        *(str(num_rows), name, f"{tokens_per_step[name]:.2f}"),
        *speed,
        f"{best['0'] / seconds:.2f} x",
      )
  return table


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("folder", nargs="*")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
  parser.add_argument("--tokens", type=int, default=128)
  parser.add_argument("--length", type=int, default=0)
  parser.add_argument("--tensor", type=int, nargs="+", default=[1])
  parser.add_argument("--processor", action="store_true")
  threads = sorted({1, torch.get_num_threads()})
  parser.add_argument("--threads", type=int, nargs="+", default=threads)
  parser.add_argument("--run", default="")
  parser.add_argument("--temperature", type=float, default=0.0)
  args = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", max(args.tensor))
  Console().print(compare_drafts(args) if args.run else compare_with_transformers(args))


if __name__ == "__main__":
  main()
