"""What a token costs: decode tokens/s with a cache against `transformers` on the same weights.

  python tools/bench/generate.py [FOLDER ...] [--rounds 5] [--batch 1 16] [--tokens 128]

Each FOLDER is a model in Hugging Face's format, such as those of tests/hf/hf_fixtures; without
one it is a Llama of random weights, 4 layers, 256 wide, 8 heads, vocabulary 512. `transformers` and
maxlite read the same float32 weights and continue the same prompts of 64 tokens greedily, in turns,
round by round, so that a drift of the machine's speed falls on each alike; torch with one thread,
which for so small a model may be faster, and with all it takes by itself, or as --threads says;
maxlite on one device, and cut along `tensor` over as many as --tensor says. Figures are the best of
all rounds, and time to the first token is left out; ratios are to the faster of `transformers`.
"products alone" are the matrix products of the Llama's step with nothing around them: no cache
makes them fewer. --processor counts the process's own time, which others on the machine disturb
less: for one core and thread. Rows of maxlite's cache have places for the texts, or --length 2048,
as a server's would. Needs `pip install -e .[hf]`.

  python tools/bench/generate.py --run runs/draft_head [--temperature 0.8] [--rounds 5] [...]

compares a run that has draft heads with itself: every number of tokens that they may propose for a
step, in turns, and none; behind prompts of Python, of which the longest text is --tokens longer.
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
from maxlite.data.tokenizers.tokenizer import open_tokenizer
from maxlite.inference.batcher import Batcher
from maxlite.inference.engine import Engine, Request
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import Rules
from maxlite.layers.linear import matmul_few_rows

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
CLOCKS = {False: time.perf_counter, True: time.process_time}  # whether of the processor
GREEDY = Rules(temperature=0.0)

# (seconds per token of every row, tokens of the first row, tokens a step)
Run = Callable[[], tuple[float, list[int], float]]


def ours(
  folder: str,
  prompts: list[list[int]],
  num_tokens: int,
  rules: Rules = GREEDY,
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
    ends=[loaded.cfg.vocab_size],  # no token: texts do not end
    num_drafts=num_drafts,
  )

  def run() -> tuple[float, list[int], float]:
    requests = [Request(prompt, num_tokens, rules, seed) for seed, prompt in enumerate(prompts)]
    batcher = Batcher(engine)
    events, start = batcher.add(requests), clock()
    while not batcher.is_idle:
      events += batcher.step()
    seconds = clock() - start
    tokens = [event.token for event in events if event.request is requests[0]]
    return seconds / (num_tokens - 1), tokens, 1 + batcher.meter.accepted_length

  return run


def theirs(
  folder: str, prompts_BT: np.ndarray, num_tokens: int, num_threads: int, clock: Clock
) -> Run:
  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  tokens_BT = torch.from_numpy(prompts_BT)

  @torch.inference_mode()
  def run() -> tuple[float, list[int], float]:
    torch.set_num_threads(num_threads)
    stamps = Stamps(clock)
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


def products_alone(num_rows: int, num_tokens: int, clock: Clock) -> Run:
  """The matrix products of a step and nothing else, in the form that XLA:CPU is fastest with."""
  wide, hidden = SHAPE.hidden_size, SHAPE.intermediate_size
  shapes = [*[(wide, wide)] * 4, (wide, hidden), (wide, hidden), (hidden, wide)]
  shapes = [*shapes * SHAPE.num_hidden_layers, (wide, VOCAB)]
  draw = np.random.default_rng(0).standard_normal
  weights = [jnp.asarray(draw(s[::-1]) / s[0] ** 0.5, jnp.float32) for s in shapes]
  times = matmul_few_rows

  @jax.jit
  def step(x_BD: jax.Array, weights: list[jax.Array]) -> jax.Array:
    *layers, unembed = weights
    for n in range(0, len(layers), 7):
      q, k, v, out, gate, up, down = layers[n : n + 7]
      x_BD = times(times(x_BD, q) + times(x_BD, k) + times(x_BD, v), out)
      x_BD = times(times(x_BD, gate) + times(x_BD, up), down)
    return times(x_BD, unembed)

  def run() -> tuple[float, list[int], float]:
    x_BD, start = jnp.ones((num_rows, wide)), clock()
    for _ in range(num_tokens - 1):
      np.asarray(step(x_BD, weights))
    return (clock() - start) / (num_tokens - 1), [], 1.0

  return run


class Stamps(BaseStreamer):
  """When the prompt and each token behind it were there."""

  def __init__(self, clock: Clock) -> None:
    self._clock, self.seconds = clock, []

  def put(self, value: torch.Tensor) -> None:
    del value
    self.seconds.append(self._clock())

  def end(self) -> None:
    pass


def measure(candidates: dict[str, Run], rounds: int) -> dict[str, float]:
  """{candidate: best seconds}, in turns."""
  best = dict.fromkeys(candidates, float("inf"))
  for _ in range(rounds):
    for name, run in candidates.items():
      best[name] = min(best[name], run()[0])
  return best


@contextlib.contextmanager
def llama() -> Iterator[str]:
  """The folder of the Llama that is compared by default."""
  with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    LlamaForCausalLM(SHAPE).save_pretrained(folder)
    yield folder


def against_transformers(args: argparse.Namespace) -> Table:
  table = Table("model", "batch", "candidate, cores", "ms a step", "tokens/s", "ratio")
  clock, differ = CLOCKS[args.processor], []
  for path in args.folder or [None]:
    with contextlib.nullcontext(path) if path else llama() as folder:
      name = Path(path).name if path else "llama"
      vocab_size = AutoConfig.from_pretrained(folder).vocab_size
      for num_rows in args.batch:
        prompts_BT = np.random.default_rng(0).integers(vocab_size, size=(num_rows, NUM_PROMPT))
        rivals = {
          f"transformers, {n}": theirs(folder, prompts_BT, args.tokens, n, clock)
          for n in args.threads
        }
        own = functools.partial(ours, folder, prompts_BT.tolist(), args.tokens, clock=clock)
        candidates = rivals | {
          f"maxlite, {n}": own(length=args.length, tensor=n) for n in args.tensor
        }
        texts = [run()[1] for run in candidates.values()]  # also compiles
        if any(text != texts[0] for text in texts):
          differ.append(f"{name} at batch {num_rows}")
        if not path:
          candidates["products alone"] = products_alone(num_rows, args.tokens, clock)
          candidates["products alone"]()
        best = measure(candidates, args.rounds)
        fastest = min(best[rival] for rival in rivals)
        for candidate, seconds in best.items():
          ratio = "" if candidate in rivals else f"{fastest / seconds:.1f}"
          figures = (f"{seconds * 1e3:.2f}", f"{num_rows / seconds:,.0f}", ratio)
          table.add_row(name, str(num_rows), candidate, *figures)
  table.caption = f"greedy tokens {'differ: ' + ', '.join(differ) if differ else 'are the same'}"
  return table


def with_drafts(args: argparse.Namespace) -> Table:
  cfg: Config = build(Config, read_saved(RunFolder(args.run).config))
  tokenizer = open_tokenizer(cfg.data)
  prompts = [[tokenizer.bos, *map(int, tokenizer.encode(text))] for text in PYTHON]
  rules = Rules(temperature=args.temperature)
  table = Table("batch", "drafts", "tokens a step", "ms per token", "tokens/s", "speed-up")
  for num_rows in args.batch:
    rows = [prompts[n % len(prompts)] for n in range(num_rows)]
    candidates = {
      str(n): ours(args.run, rows, args.tokens, rules, n)
      for n in range(cfg.model.num_draft_heads + 1)
    }
    by_step = {name: run()[2] for name, run in candidates.items()}  # also compiles
    best = measure(candidates, args.rounds)
    for name, seconds in best.items():
      speed = (f"{seconds * 1e3:.2f}", f"{num_rows / seconds:,.0f}")
      table.add_row(
        *(str(num_rows), name, f"{by_step[name]:.2f}"), *speed, f"{best['0'] / seconds:.2f} x"
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
  Console().print(with_drafts(args) if args.run else against_transformers(args))


if __name__ == "__main__":
  main()
