"""Benchmark of ensembles of small models against references timed in the same run.

  python tools/bench/ensemble.py [--rounds 7] [--processor-time] [section ...]

alike      64 MLPs of one shape with different learning rates (3 layers 8, 32 or 128 wide, 64 rows,
           Adam): stacked against a Python loop over one jitted step and, if torch is installed,
           against `torch.func` on stacked parameters
different  24 MLPs (1, 2, 4 or 6 hidden layers, 8 to 256 wide): every strategy against a loop over
           24 jitted steps, against padding by hand under `vmap`, and against one program of the
           bare 24 steps, an upper bound for fusing
simulated  the same on 8 simulated CPU devices
grouped    the matrix products of one hidden layer of those 24 members, forward and backward: a dot
           per member against one grouped matmul whose groups are the members' widths

Each candidate runs in a separate process. Candidates alternate, and the minimum time of each is
reported, because other load can only add time. "start" is the time from the members to the end of
the first step: tracing, compilation, initialization. CPU time is summed over cores, so it does not
show the gain of using several.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
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
from moe import print_ratio
from rich.console import Console
from rich.table import Table

from maxlite.config.registry import ENSEMBLE_STRATEGIES
from maxlite.ensemble import Ensemble, Member
from maxlite.kernels.grouped_matmul.api import grouped_matmul

NUM_FEATURES, NUM_ROWS = 16, 64
WIDTHS, DEPTHS = (8, 16, 32, 64, 128, 256), (1, 2, 4, 6)  # plus one layer
NUM_SIMULATED = 8
STEPS = 10  # of one timed run
WARM_ROUNDS = 3


class MLP(nn.Module):
  """`depth` layers between the first and the last one."""

  width: int
  depth: int

  @nn.compact
  def __call__(self, x_BD: jax.Array) -> jax.Array:
    x_BD = nn.relu(nn.Dense(self.width)(x_BD))
    for _ in range(self.depth):
      x_BD = Hidden(self.width)(x_BD)
    return nn.Dense(1)(x_BD)


class Hidden(nn.Module):
  width: int

  @nn.compact
  def __call__(self, x_BD: jax.Array) -> jax.Array:
    return nn.relu(nn.Dense(self.width)(x_BD))


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
  seconds: float = float("inf")  # per step
  processor_seconds: float = float("inf")

  def measure(self) -> None:
    seconds, processor_seconds = _request(self.process)
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
  names = [name for name in ALIKE if name != "torch.func" or importlib.util.find_spec("torch")]
  for width in (8, 32, 128):
    step, _ = compare(f"64 MLPs, 3 layers of {width}", names, width, 1, options)
    goal = 6 if width <= 32 else None
    print_ratio(
      f"alike, width {width}: loop / stacked", step["loop"] / step["stacked"], at_least=goal
    )
    if "torch.func" in step:
      print_ratio(
        f"alike, width {width}: torch.func / stacked", step["torch.func"] / step["stacked"]
      )


def different(options: argparse.Namespace, num_devices: int = 1) -> None:
  title = f"different, {num_devices} devices"
  names = ["auto", *(name for name in DIFFERENT if name != "auto")]
  step, start = compare(f"24 MLPs, {num_devices} devices", names, 0, num_devices, options)
  print_ratio(f"{title}: loop / auto", step["loop"] / step["auto"], at_least=1.5)
  print_ratio(f"{title}: loop / one bare program", step["loop"] / step["one bare program"])
  print_ratio(f"{title}: pad + vmap / auto", step["pad + vmap"] / step["auto"], at_least=10)
  print_ratio(f"{title}: start, auto / loop", start["auto"] / start["loop"], at_most=1)
  fastest = min(seconds for name, seconds in step.items() if name in ("auto", *ENSEMBLE_STRATEGIES))
  print_ratio(f"{title}: auto / fastest strategy", step["auto"] / fastest, at_most=1.2)


def simulated(options: argparse.Namespace) -> None:
  different(options, NUM_SIMULATED)


def grouped(options: argparse.Namespace) -> None:
  step, _ = compare("One hidden layer of 24 members", list(GROUPED), 0, 1, options)
  print_ratio("grouped: a dot per member / grouped", step["dots"] / step["grouped matmul"])


def compare(
  title: str, names: Sequence[str], width: int, num_devices: int, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
  """Print a table; return ({candidate: seconds per step}, {candidate: seconds to start})."""
  with contextlib.ExitStack() as processes:
    timed: dict[str, Timed] = {}
    for name in names:
      if name not in {other.strategy for other in timed.values()}:
        candidate = processes.enter_context(started(name, width, num_devices))
        timed |= {name: candidate} if candidate else {}
    for _ in range(WARM_ROUNDS + options.rounds):
      for candidate in timed.values():
        candidate.measure()
  table = Table(title=title, title_justify="left")
  columns = ("", "start s", "CPU time", "step ms", "CPU time", "useful FLOPs")
  for n, column in enumerate(columns):
    table.add_column(column, justify="right" if n else "left")
  for name, t in timed.items():
    step = (f"{1e3 * t.seconds:.2f}", f"{1e3 * t.processor_seconds:.2f}")
    start = (f"{t.start_seconds:.1f}", f"{t.start_processor_seconds:.1f}")
    shown = f"{name} ({t.strategy})" if t.strategy else name
    table.add_row(shown, *start, *step, f"{t.useful_share:.0%}")
  Console(width=100).print(table)
  if options.processor_time:
    return (
      {name: t.processor_seconds for name, t in timed.items()},
      {name: t.start_processor_seconds for name, t in timed.items()},
    )
  return {n: t.seconds for n, t in timed.items()}, {n: t.start_seconds for n, t in timed.items()}


@contextlib.contextmanager
def started(name: str, width: int, num_devices: int) -> Iterator[Timed | None]:
  """A candidate that is ready to be measured; prints the reason and yields None if it cannot."""
  flag = f"--xla_force_host_platform_device_count={num_devices}"
  # On a busy machine, spinning threads make PyTorch 20 times slower.
  environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
  environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag} if num_devices > 1 else {}
  command = [sys.executable, *sys.argv[:1], "--candidate", name, str(width)]
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


def serve(name: str, width: str) -> int:
  """A candidate's process: answers each line on stdin with the time of one run."""
  sys.stdin.readline()
  clocks = lambda: np.array([time.perf_counter(), time.process_time()])
  start = clocks()
  try:
    candidate = ALIKE[name](int(width)) if int(width) else (DIFFERENT | GROUPED)[name]()
  except ValueError as error:
    print(json.dumps(str(error)), flush=True)
    return 0
  ready = [*(clocks() - start).tolist(), candidate.useful_share, candidate.strategy]
  print(json.dumps(ready), flush=True)
  for _ in sys.stdin:
    start = clocks()
    candidate.run()
    print(json.dumps(((clocks() - start) / STEPS).tolist()), flush=True)
  return 0


def grid() -> list[Member]:
  shapes = [(width, depth) for width in WIDTHS for depth in DEPTHS]
  return [Member(MLP(*shape), optax.adam(1e-3), seed=z) for z, shape in enumerate(shapes)]


def batch() -> tuple[jax.Array, jax.Array]:
  """The inputs and targets of one step."""
  x_BD = jax.random.normal(jax.random.key(0), (NUM_ROWS, NUM_FEATURES))
  return x_BD, jnp.sin(jnp.sum(x_BD, axis=1, keepdims=True))


def loss(model: nn.Module, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
  x_BD, y_BD = batch
  return jnp.mean((model(x_BD) - y_BD) ** 2)


def unrolled() -> dict[str, Any]:
  """The different members, as a factory that worker processes can import."""
  return {"members": grid(), "loss": loss}


def different_candidate(strategy: str) -> Candidate:
  os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
  factory = f"{Path(__file__).stem}:{unrolled.__name__}"
  return strategy_candidate(Ensemble.from_factory(factory, strategy=strategy), strategy)


def strategy_candidate(ensemble: Ensemble, strategy: str) -> Candidate:
  run = repeated(ensemble.step, ensemble.init(batch()))
  plan = ensemble.plan
  share = next(e.useful_share for e in plan.estimates if e.strategy == plan.strategy)
  if strategy == "auto":
    Console(width=110, stderr=True).print(plan.table())
  return Candidate(run, share, plan.strategy if strategy == "auto" else "")


def alike_members(width: int) -> list[Member]:
  return [Member(MLP(width, 2), optax.adam(rate), seed=z) for z, rate in enumerate(rates())]


def rates() -> list[float]:
  return np.geomspace(1e-4, 1e-2, 64).tolist()


def one_step_loop(width: int) -> Candidate:
  """A loop over the members with one program, which takes the learning rate as an input."""
  optimizer = optax.inject_hyperparams(optax.adam)(0.0)
  init, step = solo_functions(MLP(width, 2), optimizer)
  states = []
  for z, rate in enumerate(rates()):
    params, opt_state = init(z)
    opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
    states.append((params, opt_state))
  return Candidate(repeated(one_after_another([step] * len(states)), states))


def by_torch(width: int) -> Candidate:
  from torch_ensemble import stacked_steps

  sizes = [NUM_FEATURES, *[width] * 3, 1]
  run = stacked_steps(sizes, rates(), *map(np.asarray, batch()), STEPS)
  run()
  return Candidate(run)


def loop_of_steps() -> Candidate:
  members = grid()
  functions = [solo_functions(member.model, member.optimizer) for member in members]
  states = [init(m.seed) for (init, _), m in zip(functions, members, strict=True)]
  return Candidate(repeated(one_after_another([step for _, step in functions]), states))


def solo_functions(
  model: nn.Module, optimizer: optax.GradientTransformation
) -> tuple[Callable, Callable]:
  """(init, step) of one model, jitted, without any checks."""

  @jax.jit
  def init(seed):
    params = model.init(jax.random.key(seed), batch()[0])
    return params, optimizer.init(params)

  def step(state, batch):
    params, opt_state = state
    value, gradients = jax.value_and_grad(lambda p: loss(model.bind(p), batch))(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return init, jax.jit(step, donate_argnums=0)


def one_after_another(steps: Sequence[Callable]) -> Callable:
  def step(states, batch):
    results = [step(state, batch) for step, state in zip(steps, states, strict=True)]
    return [state for state, _ in results], [value for _, value in results]

  return step


def one_bare_program() -> Candidate:
  """The steps of the loop in one program."""
  members = grid()
  functions = [solo_functions(member.model, member.optimizer) for member in members]
  states = [init(m.seed) for (init, _), m in zip(functions, members, strict=True)]
  step = jax.jit(one_after_another([step for _, step in functions]), donate_argnums=0)
  return Candidate(repeated(step, states))


def pad_and_vmap() -> Candidate:
  """All members padded to the largest, with surplus units and layers masked."""
  members = grid()
  width_Z = jnp.asarray([member.model.width for member in members])
  depth_Z = jnp.asarray([member.model.depth for member in members])
  max_width, max_depth = max(WIDTHS), max(DEPTHS)
  optimizer = members[0].optimizer

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
  states = jax.jit(jax.vmap(init))(jnp.arange(len(members)))
  run = repeated(lambda state, batch: along(state, width_Z, depth_Z, batch), states)
  useful = sum(products(member.model.width, member.model.depth) for member in members)
  share = useful / (len(members) * products(max_width, max_depth))
  return Candidate(run, share)


def hidden_layers() -> list[tuple[jax.Array, jax.Array, jax.Array]]:
  """Per member, input and weights of one hidden layer, and the cotangent of its product."""
  layers = []
  for z, member in enumerate(grid()):
    draw = np.random.default_rng(z).standard_normal
    rows, square = (NUM_ROWS, member.model.width), (member.model.width, member.model.width)
    layers.append(tuple(jnp.asarray(draw(s), jnp.float32) for s in (rows, square, rows)))
  return layers


def a_dot_each() -> Candidate:
  def products(layers, _):
    return layers, [(x_BD @ w_DF, dy_BF @ w_DF.T, x_BD.T @ dy_BF) for x_BD, w_DF, dy_BF in layers]

  return Candidate(repeated(jax.jit(products, donate_argnums=0), hidden_layers()))


def one_grouped_matmul() -> Candidate:
  """The three products as the forward and backward pass of one grouped matmul.

  Rows are the members' input units M, grouped by member; output units are padded to the largest
  width F: dw_MF = x_MB dy_ZBF, and its gradients for a cotangent w_MF are dx_MB and y_ZBF.
  """
  layers = hidden_layers()
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
  return Candidate(repeated(jax.jit(products, donate_argnums=0), (x_MB, w_MF, dy_ZBF)), share)


def products(width: int, depth: int) -> int:
  """The number of weights of all matrices, to which FLOPs are proportional."""
  return NUM_FEATURES * width + depth * width**2 + width


def repeated(step: Callable, state: Any) -> Callable[[], Any]:
  """A function that takes STEPS more steps; the first step is taken here."""
  data = batch()
  kept = [jax.block_until_ready(step(state, data))[0]]

  def run() -> None:
    for _ in range(STEPS):
      kept[0], metrics = step(kept[0], data)
    jax.block_until_ready((kept[0], metrics))

  return run


ALIKE: dict[str, Callable[[int], Candidate]] = {
  "loop": one_step_loop,
  "stacked": lambda width: strategy_candidate(
    Ensemble(alike_members(width), loss, strategy="stacked"), "stacked"
  ),
  "torch.func": by_torch,
}
DIFFERENT: dict[str, Callable[[], Candidate]] = {
  "loop": loop_of_steps,
  "one bare program": one_bare_program,
  "pad + vmap": pad_and_vmap,
} | {name: functools.partial(different_candidate, name) for name in ("auto", *ENSEMBLE_STRATEGIES)}
GROUPED = {"dots": a_dot_each, "grouped matmul": one_grouped_matmul}
SECTIONS = {"alike": alike, "different": different, "simulated": simulated, "grouped": grouped}

if __name__ == "__main__":
  sys.exit(main())
