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
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

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
from maxlite.data.tokenizer import encode_prompt, open_tokenizer
from maxlite.inference.batcher import Batcher
from maxlite.inference.drafters import max_num_drafts
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import SamplingParams
from maxlite.kernels.xla_cpu import matmul_few_rows

PYTHON = b"def |class |import |    return |for i in |if not |try:\n|# ".split(b"|")
NUM_PROMPT = 64
VOCAB = 512
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
GREEDY = SamplingParams(temperature=0.0)


class Decoded(NamedTuple):
  """The result of decoding a batch.

  Attributes:
    seconds: per decoded token of every row.
    tokens: the completion of the first row; empty if there is none.
    tokens_per_step: more than 1 with accepted drafts.
  """

  seconds: float
  tokens: list[int]
  tokens_per_step: float = 1.0


Run = Callable[[], Decoded]


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
  """A run of maxlite's engine.

  Args:
    folder: a run, or a model in Hugging Face's format.
    num_tokens: the length of every completion.
    num_drafts: tokens that draft heads propose per step.
    length: positions of a row of the cache; 0: as many as needed.
    tensor: the number of devices that the model is sharded over.
  """
  loaded, params = maxlite.load(folder, mesh={"tensor": tensor})
  if not length:
    length = max(map(len, prompts)) + num_tokens
  engine = Engine(
    inference_model(loaded.cfg, loaded.sharder),
    inference_params(loaded.cfg, params),
    num_rows=len(prompts),
    max_length=length,
    stop_token_ids=[loaded.cfg.vocab_size],  # outside the vocabulary: no completion stops early
    num_drafts=num_drafts,
  )

  def run() -> Decoded:
    requests = []
    for seed, prompt in enumerate(prompts):
      requests.append(GenerationRequest(prompt, num_tokens, sampling, seed))
    batcher = Batcher(engine)
    events = batcher.add(requests)
    start = clock()
    while not batcher.is_idle:
      events += batcher.step()
    seconds = clock() - start
    return Decoded(
      seconds=seconds / (num_tokens - 1),
      tokens=[event.token for event in events if event.request is requests[0]],
      tokens_per_step=1 + batcher.throughput.accepted_length,
    )

  return run


def transformers_run(
  folder: str,
  prompts_BT: np.ndarray,
  num_tokens: int,
  num_threads: int,
  clock: Clock,
) -> Run:
  """A run of `transformers` with a number of threads."""
  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  tokens_BT = torch.from_numpy(prompts_BT)
  options = {
    "max_new_tokens": num_tokens,
    "min_new_tokens": num_tokens,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
  }

  @torch.inference_mode()
  def run() -> Decoded:
    torch.set_num_threads(num_threads)
    stamps = Timestamps(clock)
    completed_BT = model.generate(
      tokens_BT,
      attention_mask=torch.ones_like(tokens_BT),
      streamer=stamps,
      **options,
    )
    # The stamp of the prompt precedes that of the first token.
    seconds = stamps.seconds[-1] - stamps.seconds[1]
    return Decoded(seconds / (num_tokens - 1), completed_BT[0, NUM_PROMPT:].tolist())

  return run


def matmuls_alone(
  num_rows: int,
  num_tokens: int,
  clock: Clock,
) -> Run:
  """Run only the matrix products of a decode step, in the layout that is fastest on XLA:CPU."""
  weights = draw_weights()
  matmul = matmul_few_rows

  @jax.jit
  def step(x_BD: jax.Array, weights: list[jax.Array]) -> jax.Array:
    *layers, unembed = weights
    for n in range(0, len(layers), 7):
      q, k, v, out, gate, up, down = layers[n : n + 7]
      x_BD = matmul(matmul(x_BD, q) + matmul(x_BD, k) + matmul(x_BD, v), out)
      x_BD = matmul(matmul(x_BD, gate) + matmul(x_BD, up), down)
    return matmul(x_BD, unembed)

  def run() -> Decoded:
    x_BD = jnp.ones((num_rows, SHAPE.hidden_size))
    start = clock()
    for _ in range(num_tokens - 1):
      np.asarray(step(x_BD, weights))
    return Decoded((clock() - start) / (num_tokens - 1), [])

  return run


def draw_weights() -> list[jax.Array]:
  """Random matrices: seven per layer, and the unembedding; each transposed."""
  width = SHAPE.hidden_size
  hidden = SHAPE.intermediate_size
  attention = [(width, width)] * 4
  mlp = [(width, hidden), (width, hidden), (hidden, width)]
  shapes = [*attention, *mlp] * SHAPE.num_hidden_layers
  shapes.append((width, VOCAB))
  rng = np.random.default_rng(0)
  weights = []
  for num_in, num_out in shapes:
    w_FD = rng.standard_normal((num_out, num_in)) / num_in**0.5
    weights.append(jnp.asarray(w_FD, jnp.float32))
  return weights


class Timestamps(BaseStreamer):
  """Records when the prompt and each token were processed."""

  def __init__(self, clock: Clock) -> None:
    self._clock = clock
    self.seconds: list[float] = []

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
      best[name] = min(best[name], run().seconds)
  return best


@contextlib.contextmanager
def llama() -> Iterator[str]:
  """Create the folder of the default Llama."""
  with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    LlamaForCausalLM(SHAPE).save_pretrained(folder)
    yield folder


def compare_with_transformers(args: argparse.Namespace) -> Table:
  """A table of all candidates, for each folder, or the default Llama, and each batch size."""
  table = Table("model", "batch", "candidate, cores", "ms per step", "tokens/s", "ratio")
  comparison = Comparison(args, table)
  for folder in args.folder:
    comparison.add_model(Path(folder).name, folder)
  if not args.folder:
    with llama() as folder:
      comparison.add_model("llama", folder, is_default=True)
  if comparison.differing:
    table.caption = f"greedy tokens differ: {', '.join(comparison.differing)}"
  else:
    table.caption = "greedy tokens are the same"
  return table


class Comparison:
  """Fills the table of `compare_with_transformers`.

  Attributes:
    differing: the models and batch sizes whose candidates return different tokens.
  """

  def __init__(
    self,
    args: argparse.Namespace,
    table: Table,
  ) -> None:
    self._args = args
    self._table = table
    self._clock = time.process_time if args.processor else time.perf_counter
    self.differing: list[str] = []

  def add_model(
    self,
    name: str,
    folder: str,
    is_default: bool = False,
  ) -> None:
    """Add the rows of a model; of the default Llama also its matmuls alone."""
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    for num_rows in self._args.batch:
      rng = np.random.default_rng(0)
      prompts_BT = rng.integers(vocab_size, size=(num_rows, NUM_PROMPT))
      references = self._references(folder, prompts_BT)
      candidates = references | self._candidates(folder, prompts_BT)
      completions = [run().tokens for run in candidates.values()]  # also compiles
      if any(tokens != completions[0] for tokens in completions):
        self.differing.append(f"{name} at batch {num_rows}")
      if is_default:
        candidates["matmuls alone"] = matmuls_alone(num_rows, self._args.tokens, self._clock)
        candidates["matmuls alone"]()
      best = measure(candidates, self._args.rounds)
      fastest = min(best[reference] for reference in references)
      for candidate, seconds in best.items():
        ratio = ""
        if candidate not in references:
          ratio = f"{fastest / seconds:.1f}"
        self._table.add_row(
          name,
          str(num_rows),
          candidate,
          f"{seconds * 1e3:.2f}",
          f"{num_rows / seconds:,.0f}",
          ratio,
        )

  def _references(
    self,
    folder: str,
    prompts_BT: np.ndarray,
  ) -> dict[str, Run]:
    """Runs of `transformers`, by their number of threads."""
    runs = {}
    for num_threads in self._args.threads:
      run = transformers_run(folder, prompts_BT, self._args.tokens, num_threads, self._clock)
      runs[f"transformers, {num_threads}"] = run
    return runs

  def _candidates(
    self,
    folder: str,
    prompts_BT: np.ndarray,
  ) -> dict[str, Run]:
    """Runs of maxlite, by their number of devices."""
    runs = {}
    for num_devices in self._args.tensor:
      runs[f"maxlite, {num_devices}"] = maxlite_run(
        folder,
        prompts_BT.tolist(),
        self._args.tokens,
        clock=self._clock,
        length=self._args.length,
        tensor=num_devices,
      )
    return runs


def compare_drafts(args: argparse.Namespace) -> Table:
  """A table of a run with draft heads, for each batch size and number of proposed tokens."""
  cfg: Config = build(Config, read_saved(RunFolder(args.run).config))
  tokenizer = open_tokenizer(cfg.data)
  prompts = []
  for text in PYTHON:
    prompts.append(encode_prompt(tokenizer, text))
  sampling = SamplingParams(temperature=args.temperature)
  table = Table("batch", "drafts", "tokens per step", "ms per token", "tokens/s", "speed-up")
  for num_rows in args.batch:
    rows = [prompts[n % len(prompts)] for n in range(num_rows)]
    candidates = {}
    tokens_per_step = {}
    for num_drafts in range(max_num_drafts(cfg.model) + 1):
      name = str(num_drafts)
      candidates[name] = maxlite_run(args.run, rows, args.tokens, sampling, num_drafts)
    for name, run in candidates.items():
      tokens_per_step[name] = run().tokens_per_step  # also compiles
    best = measure(candidates, args.rounds)
    for name, seconds in best.items():
      table.add_row(
        str(num_rows),
        name,
        f"{tokens_per_step[name]:.2f}",
        f"{seconds * 1e3:.2f}",
        f"{num_rows / seconds:,.0f}",
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
  if args.run:
    table = compare_drafts(args)
  else:
    table = compare_with_transformers(args)
  Console().print(table)


if __name__ == "__main__":
  main()
