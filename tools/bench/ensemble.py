"""Benchmark of ensembles of small models against references timed in the same run.

  python tools/bench/ensemble.py [--rounds 7] [--processor-time] [section ...]

alike      64 MLPs of one shape with different learning rates (3 layers 8, 32 or 128 wide, 64 rows,
           Adam): stacked against a Python loop over one jitted step, against `jax.vmap` by hand
           and, if torch is installed, against `torch.func` on stacked parameters
decoders   the same for 12 decoders (2 layers, 64 wide, 8 x 64 tokens); then 12 decoders of
           different depth and width, as in `different`
different  24 MLPs (1, 2, 4 or 6 hidden layers, 8 to 256 wide): every strategy against a loop over
           24 jitted steps, against padding by hand under `vmap`, and against one program of the
           bare 24 steps, an upper bound for fusing
simulated  the same on 8 simulated CPU devices
grouped    the matrix products of one hidden layer of those 24 members, forward and backward: a dot
           per member against one grouped matmul whose groups are the members' widths

Each candidate runs in a separate process. Candidates alternate, and the minimum time of each is
reported, because other load can only add time. "start" is the time from the members to the end of
the first step: tracing, compilation, initialization. CPU time is summed over cores, so it does not
show the gain of using several. Memory is the peak of a candidate's process with its libraries,
without the processes that it starts.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ensemble_problems import (
  DEPTHS,
  MLP,
  NUM_FEATURES,
  NUM_HEADS,
  NUM_ROWS,
  PROBLEMS,
  VOCAB_SIZE,
  WIDTHS,
  Problem,
)
from moe import print_ratio
from rich.console import Console
from rich.table import Table

from maxlite.config.registry import ENSEMBLE_STRATEGIES
from maxlite.ensemble import Ensemble
from maxlite.kernels.grouped_matmul.api import grouped_matmul

NUM_SIMULATED = 8
STEPS = 10  # of one timed run
WARM_ROUNDS = 3


class Candidate(NamedTuple):
  """One way to train all members; `run` takes STEPS steps and waits for the results."""

  run: Callable[[], Any]
  useful_share: float = 1.0
  strategy: str = ""  # chosen by `auto`


@dataclasses.dataclass
class Timed:
  """A candidate's process and its measurements."""

  process: subprocess.Popen
  start_seconds: float
  start_processor_seconds: float
  useful_share: float
  strategy: str
  peak_mib: float = 0.0
  seconds: float = float("inf")  # per step
  processor_seconds: float = float("inf")

  def measure(self) -> None:
    seconds, processor_seconds, self.peak_mib = _request(self.process)
    self.seconds = min(self.seconds, seconds)
    self.processor_seconds = min(self.processor_seconds, processor_seconds)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--processor-time", action="store_true")
  parser.add_argument("--candidate", nargs=2, help=argparse.SUPPRESS)
  parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="section")
  options = parser.parse_args()
  if options.candidate:
    return serve(*options.candidate)
  for section in options.sections or SECTIONS:
    SECTIONS[section](options)
  return 0


def alike(options: argparse.Namespace) -> None:
  for width in (8, 32, 128):
    goal = 6 if width <= 32 else None
    compare_alike(f"64 MLPs, 3 layers of {width}", f"mlps_{width}", options, goal)


def compare_alike(
  title: str, problem: str, options: argparse.Namespace, goal: float | None = None
) -> None:
  names = [name for name in ALIKE if name != "torch.func" or importlib.util.find_spec("torch")]
  step, start = compare(title, names, problem, 1, options)
  for name in names[1:]:
    at_least = goal if name == "loop" else None
    print_ratio(f"{title}: {name} / stacked", step[name] / step["stacked"], at_least=at_least)
  by_hand = start["stacked"] / start["jax.vmap"]
  print_ratio(f"{title}: start, stacked / jax.vmap", by_hand, at_most=1.2)


def decoders(options: argparse.Namespace) -> None:
  compare_alike("12 decoders of one shape", "decoders_alike", options)
  compare_different("12 decoders", ["auto", *DIFFERENT], "decoders_different", 1, options)


def different(options: argparse.Namespace, num_devices: int = 1) -> None:
  names = ["auto", "pad + vmap", *DIFFERENT]
  title = f"24 MLPs, {num_devices} devices"
  step = compare_different(title, names, "mlps_different", num_devices, options)
  print_ratio(f"{title}: pad + vmap / auto", step["pad + vmap"] / step["auto"], at_least=10)


def compare_different(
  title: str, names: list[str], problem: str, num_devices: int, options: argparse.Namespace
) -> dict[str, float]:
  step, start = compare(title, names, problem, num_devices, options)
  print_ratio(f"{title}: loop / auto", step["loop"] / step["auto"], at_least=1.5)
  print_ratio(f"{title}: loop / one bare program", step["loop"] / step["one bare program"])
  print_ratio(f"{title}: start, auto / loop", start["auto"] / start["loop"], at_most=1)
  fastest = min(seconds for name, seconds in step.items() if name in ("auto", *ENSEMBLE_STRATEGIES))
  print_ratio(f"{title}: auto / fastest strategy", step["auto"] / fastest, at_most=1.2)
  return step


def simulated(options: argparse.Namespace) -> None:
  different(options, NUM_SIMULATED)


def grouped(options: argparse.Namespace) -> None:
  step, _ = compare("One hidden layer of 24 members", list(GROUPED), "mlps_different", 1, options)
  print_ratio("grouped: a dot per member / grouped", step["dots"] / step["grouped matmul"])


def compare(
  title: str, names: Sequence[str], problem: str, num_devices: int, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
  """Print a table; return ({candidate: seconds per step}, {candidate: seconds to start})."""
  with contextlib.ExitStack() as processes:
    timed: dict[str, Timed] = {}
    for name in names:
      if name not in {other.strategy for other in timed.values()}:
        candidate = processes.enter_context(started(name, problem, num_devices))
        timed |= {name: candidate} if candidate else {}
    for _ in range(WARM_ROUNDS + options.rounds):
      for candidate in timed.values():
        candidate.measure()
  table = Table(title=title, title_justify="left")
  columns = ("", "start s", "CPU time", "step ms", "CPU time", "MiB", "useful FLOPs")
  for n, column in enumerate(columns):
    table.add_column(column, justify="right" if n else "left")
  for name, t in timed.items():
    step = (f"{1e3 * t.seconds:.2f}", f"{1e3 * t.processor_seconds:.2f}")
    start = (f"{t.start_seconds:.1f}", f"{t.start_processor_seconds:.1f}")
    shown = f"{name} ({t.strategy})" if t.strategy else name
    table.add_row(shown, *start, *step, f"{t.peak_mib:,.0f}", f"{t.useful_share:.0%}")
  Console(width=100).print(table)
  if options.processor_time:
    return (
      {name: t.processor_seconds for name, t in timed.items()},
      {name: t.start_processor_seconds for name, t in timed.items()},
    )
  return {n: t.seconds for n, t in timed.items()}, {n: t.start_seconds for n, t in timed.items()}


@contextlib.contextmanager
def started(name: str, problem: str, num_devices: int) -> Iterator[Timed | None]:
  """A candidate that is ready to be measured; prints the reason and yields None if it cannot."""
  flag = f"--xla_force_host_platform_device_count={num_devices}"
  # On a busy machine, spinning threads make PyTorch 20 times slower.
  environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
  environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag} if num_devices > 1 else {}
  command = [sys.executable, *sys.argv[:1], "--candidate", name, problem]
  pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
  with subprocess.Popen(command, env=environment, **pipes) as process:
    assert process.stdin
    ready = _request(process)
    if isinstance(ready, str):
      print(ready)
      yield None
    else:
      yield Timed(process, *ready)
    process.stdin.close()


def _request(process: subprocess.Popen) -> Any:
  assert process.stdin
  assert process.stdout
  process.stdin.write("\n")
  process.stdin.flush()
  answer = process.stdout.readline()
  if not answer:
    raise RuntimeError(f"{' '.join(process.args)} exited with code {process.wait()}")
  return json.loads(answer)


def serve(name: str, problem: str) -> int:
  """A candidate's process: answers each line on stdin with the time and memory of one run."""
  sys.stdin.readline()
  clocks = lambda: np.array([time.perf_counter(), time.process_time()])
  start = clocks()
  try:
    candidate = CANDIDATES[name](problem)
  except ValueError as error:
    print(json.dumps(str(error)), flush=True)
    return 0
  ready = [*(clocks() - start).tolist(), candidate.useful_share, candidate.strategy]
  print(json.dumps(ready), flush=True)
  for _ in sys.stdin:
    start = clocks()
    candidate.run()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([*((clocks() - start) / STEPS).tolist(), peak_mib]), flush=True)
  return 0


def by_strategy(strategy: str, problem: str) -> Candidate:
  own = PROBLEMS[problem]()
  if strategy == "processes":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    factory = f"ensemble_problems:{problem}_members"
    ensemble = Ensemble.from_factory(factory, strategy=strategy)
  else:
    ensemble = Ensemble(own.members, own.loss, strategy=strategy)
  run = repeated(ensemble.step, ensemble.init(own.batch), own.batch)
  plan = ensemble.plan
  share = next(e.useful_share for e in plan.estimates if e.strategy == plan.strategy)
  if strategy == "auto":
    Console(width=110, stderr=True).print(plan.table())
  return Candidate(run, share, plan.strategy if strategy == "auto" else "")


def loop_of_steps(problem: str) -> Candidate:
  """A loop over the members, with one program per model, which takes the rate as an input."""
  step, states = solo_steps(PROBLEMS[problem]())
  return Candidate(repeated(step, states, PROBLEMS[problem]().batch))


def one_bare_program(problem: str) -> Candidate:
  """The steps of the loop in one program."""
  step, states = solo_steps(PROBLEMS[problem]())
  return Candidate(repeated(jax.jit(step, donate_argnums=0), states, PROBLEMS[problem]().batch))


def vmap_by_hand(problem: str) -> Candidate:
  """All members, which have one model, by `jax.vmap` of the loop's functions."""
  models, rates, data, loss = PROBLEMS[problem]()
  init, step = solo_functions(models[0], data, loss)
  params, opt_state = jax.jit(jax.vmap(init))(jnp.arange(len(rates)))
  opt_state.hyperparams["learning_rate"] = jnp.asarray(rates, jnp.float32)
  step = jax.jit(jax.vmap(step, in_axes=(0, None)), donate_argnums=0)
  return Candidate(repeated(step, (params, opt_state), data))


def by_torch(problem: str) -> Candidate:
  import torch_ensemble

  models, rates, data, _ = PROBLEMS[problem]()
  width, depth = models[0].width, models[0].depth
  if isinstance(models[0], MLP):
    build = functools.partial(torch_ensemble.mlp, [NUM_FEATURES, *[width] * (depth + 1), 1])
  else:
    build = functools.partial(torch_ensemble.Decoder, VOCAB_SIZE, width, depth, NUM_HEADS)
  run = torch_ensemble.stacked_steps(build, rates, *map(np.asarray, data), STEPS)
  run()
  return Candidate(run)


def solo_steps(problem: Problem) -> tuple[Callable, list]:
  """(the step of all members one after another, their states)"""
  functions_of = functools.cache(
    lambda model: tuple(map(jax.jit, solo_functions(model, problem.batch, problem.loss)))
  )
  states, steps = [], []
  for z, (model, rate) in enumerate(zip(problem.models, problem.rates, strict=True)):
    init, step = functions_of(model)
    params, opt_state = init(z)
    opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
    states.append((params, opt_state))
    steps.append(step)
  return one_after_another(steps), states


def solo_functions(model: nn.Module, data: tuple, loss: Callable) -> tuple[Callable, Callable]:
  """(init, step) of one model, without any checks."""
  optimizer = optax.inject_hyperparams(optax.adam)(0.0)

  def init(seed):
    params = model.init(jax.random.key(seed), data[0])
    return params, optimizer.init(params)

  def step(state, data):
    params, opt_state = state
    value, gradients = jax.value_and_grad(lambda p: loss(model.bind(p), data))(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return init, step


def one_after_another(steps: Sequence[Callable]) -> Callable:
  def step(states, batch):
    results = [step(state, batch) for step, state in zip(steps, states, strict=True)]
    return [state for state, _ in results], [value for _, value in results]

  return step


def pad_and_vmap(problem: str) -> Candidate:
  """All MLPs padded to the largest, with surplus units and layers masked."""
  models, rates, data, _ = PROBLEMS[problem]()
  width_Z = jnp.asarray([model.width for model in models])
  depth_Z = jnp.asarray([model.depth for model in models])
  max_width, max_depth = max(WIDTHS), max(DEPTHS)
  optimizer = optax.adam(rates[0])

  def init(seed):
    keys = jax.random.split(jax.random.key(seed), max_depth + 2)
    scaled = nn.initializers.lecun_normal()
    sizes = [NUM_FEATURES, *[max_width] * (max_depth + 1), 1]
    shapes = list(itertools.pairwise(sizes))
    params = [(scaled(k, s), jnp.zeros(s[1])) for k, s in zip(keys, shapes, strict=True)]
    return params, optimizer.init(params)

  def masked_loss(params, width, depth, batch):
    x_BD, y_BD = batch
    unit_D = (jnp.arange(max_width) < width).astype(x_BD.dtype)
    for layer, (w_DF, b_F) in enumerate(params[:-1]):
      y_BF = nn.relu(x_BD @ w_DF + b_F) * unit_D
      x_BD = y_BF if layer == 0 else jnp.where(layer <= depth, y_BF, x_BD)
    w_DF, b_F = params[-1]
    return jnp.mean((x_BD @ w_DF + b_F - y_BD) ** 2)

  def step(state, width, depth, batch):
    params, opt_state = state
    value, gradients = jax.value_and_grad(masked_loss)(params, width, depth, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  along = jax.jit(jax.vmap(step, in_axes=(0, 0, 0, None)), donate_argnums=0)
  states = jax.jit(jax.vmap(init))(jnp.arange(len(models)))
  run = repeated(lambda state, batch: along(state, width_Z, depth_Z, batch), states, data)
  useful = sum(products(model.width, model.depth) for model in models)
  share = useful / (len(models) * products(max_width, max_depth))
  return Candidate(run, share)


def hidden_layers(problem: str) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
  """Per member, input and weights of one hidden layer, and the cotangent of its product."""
  layers = []
  for z, model in enumerate(PROBLEMS[problem]().models):
    draw = np.random.default_rng(z).standard_normal
    rows, square = (NUM_ROWS, model.width), (model.width, model.width)
    layers.append(tuple(jnp.asarray(draw(s), jnp.float32) for s in (rows, square, rows)))
  return layers


def a_dot_each(problem: str) -> Candidate:
  def products(layers, _):
    return layers, [(x_BD @ w_DF, dy_BF @ w_DF.T, x_BD.T @ dy_BF) for x_BD, w_DF, dy_BF in layers]

  return Candidate(repeated(jax.jit(products, donate_argnums=0), hidden_layers(problem), None))


def one_grouped_matmul(problem: str) -> Candidate:
  """The three products as the forward and backward pass of one grouped matmul.

  Rows are the members' input units M, grouped by member; output units are padded to the largest
  width F: dw_MF = x_MB dy_ZBF, and its gradients for a cotangent w_MF are dx_MB and y_ZBF.
  """
  layers = hidden_layers(problem)
  size_Z = jnp.asarray([w_DF.shape[0] for _, w_DF, _ in layers])
  wide = lambda array: jnp.pad(array, ((0, 0), (0, max(WIDTHS) - array.shape[1])))
  x_MB = jnp.concatenate([x_BD.T for x_BD, _, _ in layers])
  w_MF = jnp.concatenate([wide(w_DF) for _, w_DF, _ in layers])
  dy_ZBF = jnp.stack([wide(dy_BF) for _, _, dy_BF in layers])
  multiply = functools.partial(grouped_matmul, group_sizes_G=size_Z, backend="tiled")

  def products(layers, _):
    x_MB, w_MF, dy_ZBF = layers
    dw_MF, gradients = jax.vjp(multiply, x_MB, dy_ZBF)
    return layers, (dw_MF, gradients(w_MF))

  share = sum(w_DF.size for _, w_DF, _ in layers) / w_MF.size
  operands = x_MB, w_MF, dy_ZBF
  return Candidate(repeated(jax.jit(products, donate_argnums=0), operands, None), share)


def products(width: int, depth: int) -> int:
  """The number of weights of all matrices, to which FLOPs are proportional."""
  return NUM_FEATURES * width + depth * width**2 + width


def repeated(step: Callable, state: Any, data: Any) -> Callable[[], Any]:
  """A function that takes STEPS more steps; the first step is taken here."""
  kept = [jax.block_until_ready(step(state, data))[0]]

  def run() -> None:
    for _ in range(STEPS):
      kept[0], metrics = step(kept[0], data)
    jax.block_until_ready((kept[0], metrics))

  return run


STRATEGIES = {name: functools.partial(by_strategy, name) for name in ("auto", *ENSEMBLE_STRATEGIES)}
ALIKE = ("stacked", "loop", "jax.vmap", "torch.func")
DIFFERENT = ("loop", "one bare program", *ENSEMBLE_STRATEGIES)
GROUPED = {"dots": a_dot_each, "grouped matmul": one_grouped_matmul}
CANDIDATES: dict[str, Callable[[str], Candidate]] = {
  "loop": loop_of_steps,
  "one bare program": one_bare_program,
  "jax.vmap": vmap_by_hand,
  "pad + vmap": pad_and_vmap,
  "torch.func": by_torch,
  **STRATEGIES,
  **GROUPED,
}
SECTIONS = {
  "alike": alike,
  "decoders": decoders,
  "different": different,
  "simulated": simulated,
  "grouped": grouped,
}
if __name__ == "__main__":
  sys.exit(main())
