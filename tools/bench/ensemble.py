"""What training many small models at once saves, as ratios to references timed in the same run.

  python tools/bench/ensemble.py [--rounds 7] [--processor-time] [section ...]

alike      64 MLPs of one shape with learning rates of their own (3 layers 8, 32 or 128 wide, 64
           rows, Adam): stacked against a Python loop over one jitted step, and, where torch is
           installed, against `torch.func` on stacked parameters
different  24 MLPs (1, 2, 4 or 6 hidden layers, 8 to 256 wide): every strategy against a loop over
           24 jitted steps and against padding all to the largest by hand under `vmap`
simulated  the same on 8 simulated CPU devices

"start" is everything from the members to the end of the first step: tracing, compiling, initial
values. Candidates take turns, round by round, and medians are compared: a busy machine slows all
alike. Processor time counts both cores, and so leaves out what a strategy gains by using them.
"""

import argparse
import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from moe import Timer, judge
from rich.console import Console
from rich.table import Table

from maxlite.ensemble import STRATEGIES, Ensemble, Member
from maxlite.parallel.process import keep_freed_memory

NUM_FEATURES, NUM_ROWS = 16, 64
WIDTHS, DEPTHS = (8, 16, 32, 64, 128, 256), (1, 2, 4, 6)  # by one more layer deep
NUM_SIMULATED = 8
STEPS = 10  # of one timed run


class MLP(nn.Module):
  """`depth` layers between the first and the last; `scan` keeps them in stacked arrays."""

  width: int
  depth: int
  scan: bool = False

  @nn.compact
  def __call__(self, x_BD: jax.Array) -> jax.Array:
    x_BD = nn.relu(nn.Dense(self.width)(x_BD))
    if self.scan:
      layers = nn.scan(Hidden, {"params": 0}, split_rngs={"params": True}, length=self.depth)
      x_BD, _ = layers(self.width)(x_BD, None)
    else:
      for _ in range(self.depth):
        x_BD, _ = Hidden(self.width)(x_BD, None)
    return nn.Dense(1)(x_BD)


class Hidden(nn.Module):
  width: int

  @nn.compact
  def __call__(self, x_BD: jax.Array, _: None) -> tuple[jax.Array, None]:
    return nn.relu(nn.Dense(self.width)(x_BD)), None


class Candidate(NamedTuple):
  """One way to train all members; `run` does STEPS steps and waits for them."""

  run: Callable[[], Any]
  start_seconds: float
  useful_share: float = 1.0


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--processor-time", action="store_true")
  parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="section")
  options = parser.parse_args()
  keep_freed_memory()
  timer = Timer(options.rounds, options.processor_time)
  print(f"{len(jax.devices())} x {jax.devices()[0].device_kind}, {options.rounds} rounds")
  for section in options.sections or SECTIONS:
    SECTIONS[section](timer)
  return 0


def alike(timer: Timer) -> None:
  rates = np.geomspace(1e-4, 1e-2, 64).tolist()
  for width in (8, 32, 128):
    members = [Member(MLP(width, 2), optax.adam(rate), seed=z) for z, rate in enumerate(rates)]
    candidates = {"loop": one_step_loop(MLP(width, 2), rates)}
    candidates["stacked"] = strategy_candidate(members, "stacked", jax.devices()[:1])
    if importlib.util.find_spec("torch"):
      # On a busy machine, threads that wait by spinning make PyTorch 20 times slower.
      os.environ.setdefault("OMP_WAIT_POLICY", "passive")
      from torch_ensemble import stacked_steps

      start = time.perf_counter()
      sizes = [NUM_FEATURES, *[width] * 3, 1]
      run = stacked_steps(sizes, rates, *map(np.asarray, batch()), STEPS)
      run()
      candidates["torch.func"] = Candidate(run, time.perf_counter() - start)
    seconds = report(f"64 MLPs, 3 layers of {width}", candidates, timer)
    goal = 6 if width <= 32 else None
    judge(
      f"alike, width {width}: loop / stacked", seconds["loop"] / seconds["stacked"], at_least=goal
    )
    if "torch.func" in seconds:
      judge(
        f"alike, width {width}: torch.func / stacked", seconds["torch.func"] / seconds["stacked"]
      )


def different(timer: Timer) -> None:
  devices = jax.devices()
  members = grid(scan=False)
  candidates = {"loop": loop_of_steps(members), "pad + vmap": pad_and_vmap(members)}
  for strategy in STRATEGIES:
    try:
      own = grid(scan=True) if strategy == "padded" else members
      candidates[strategy] = strategy_candidate(own, strategy, devices)
    except ValueError as error:
      print(error)
  auto = Ensemble(members, loss, devices=devices)
  auto.init(batch())
  seconds = report(f"24 MLPs, {len(devices)} devices", candidates, timer)
  chosen = auto.plan.strategy
  Console(width=110).print(auto.plan.table())
  title = f"different, {len(devices)} devices"
  ratio = seconds["loop"] / seconds[chosen]
  judge(f"{title}: loop / {chosen}", ratio, at_least=1.5)
  judge(f"{title}: pad + vmap / {chosen}", seconds["pad + vmap"] / seconds[chosen], at_least=10)
  start = candidates[chosen].start_seconds / candidates["loop"].start_seconds
  judge(f"{title}: start, {chosen} / loop", start, at_most=1)
  fastest = min(s for name, s in seconds.items() if name in STRATEGIES)
  judge(f"{title}: {chosen} / fastest strategy", seconds[chosen] / fastest, at_most=1.2)


def simulated(timer: Timer) -> None:
  flag = f"--xla_force_host_platform_device_count={NUM_SIMULATED}"
  command = [sys.executable, *sys.argv[:1], "--rounds", str(timer.rounds), "different"]
  command += ["--processor-time"] * timer.processor_time
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
  subprocess.run(command, env=environment, check=True)


def grid(*, scan: bool) -> list[Member]:
  shapes = [(width, depth) for width in WIDTHS for depth in DEPTHS]
  return [
    Member(MLP(*shape, scan=scan), optax.adam(1e-3), seed=z) for z, shape in enumerate(shapes)
  ]


def batch() -> tuple[jax.Array, jax.Array]:
  """The inputs and targets of one step."""
  x_BD = jax.random.normal(jax.random.key(0), (NUM_ROWS, NUM_FEATURES))
  return x_BD, jnp.sin(jnp.sum(x_BD, axis=1, keepdims=True))


def loss(model: nn.Module, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
  x_BD, y_BD = batch
  return jnp.mean((model(x_BD) - y_BD) ** 2)


def strategy_candidate(
  members: Sequence[Member], strategy: str, devices: Sequence[jax.Device]
) -> Candidate:
  start = time.perf_counter()
  ensemble = Ensemble(members, loss, strategy=strategy, devices=devices)
  state = ensemble.init(batch())
  run = repeated(ensemble.step, state)
  seconds = time.perf_counter() - start
  share = next(e.useful_share for e in ensemble.plan.estimates if e.strategy == strategy)
  return Candidate(run, seconds, share)


def one_step_loop(model: nn.Module, rates: Sequence[float]) -> Candidate:
  """Members one after the other through one program that is handed their learning rates."""
  start = time.perf_counter()
  optimizer = optax.inject_hyperparams(optax.adam)(0.0)
  init, step = solo_functions(model, optimizer)
  states = []
  for z, rate in enumerate(rates):
    params, opt_state = init(z)
    opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
    states.append((params, opt_state))
  run = repeated(in_turn([step] * len(states)), states)
  return Candidate(run, time.perf_counter() - start)


def loop_of_steps(members: Sequence[Member]) -> Candidate:
  start = time.perf_counter()
  functions = [solo_functions(member.model, member.optimizer) for member in members]
  states = [init(m.seed) for (init, _), m in zip(functions, members, strict=True)]
  run = repeated(in_turn([step for _, step in functions]), states)
  return Candidate(run, time.perf_counter() - start)


def solo_functions(
  model: nn.Module, optimizer: optax.GradientTransformation
) -> tuple[Callable, Callable]:
  """(init, step) of one model, jitted, with nothing but what training it takes."""

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


def in_turn(steps: Sequence[Callable]) -> Callable:
  def step(states, batch):
    results = [step(state, batch) for step, state in zip(steps, states, strict=True)]
    return [state for state, _ in results], [value for _, value in results]

  return step


def pad_and_vmap(members: Sequence[Member]) -> Candidate:
  """All members as wide and deep as the largest, units and layers that are too many masked."""
  start = time.perf_counter()
  width_Z = jnp.asarray([member.model.width for member in members])
  depth_Z = jnp.asarray([member.model.depth for member in members])
  most_wide, most_deep = max(WIDTHS), max(DEPTHS)
  optimizer = members[0].optimizer

  def init(seed):
    keys = jax.random.split(jax.random.key(seed), most_deep + 2)
    scaled = nn.initializers.lecun_normal()
    sizes = [NUM_FEATURES, *[most_wide] * (most_deep + 1), 1]
    shapes = list(itertools.pairwise(sizes))
    params = [(scaled(k, s), jnp.zeros(s[1])) for k, s in zip(keys, shapes, strict=True)]
    return params, optimizer.init(params)

  def masked_loss(params, width, depth, batch):
    x_BD, y_BD = batch
    unit_D = (jnp.arange(most_wide) < width).astype(x_BD.dtype)
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
  share = useful / (len(members) * products(most_wide, most_deep))
  return Candidate(run, time.perf_counter() - start, share)


def products(width: int, depth: int) -> int:
  """Weights of all matrices, to which FLOPs are in proportion."""
  return NUM_FEATURES * width + depth * width**2 + width


def repeated(step: Callable, state: Any) -> Callable[[], Any]:
  """A run of STEPS steps from where the last one ended; takes one step first."""
  data = batch()
  kept = [jax.block_until_ready(step(state, data))[0]]

  def run() -> None:
    for _ in range(STEPS):
      kept[0], metrics = step(kept[0], data)
    jax.block_until_ready((kept[0], metrics))

  return run


def report(title: str, candidates: dict[str, Candidate], timer: Timer) -> dict[str, float]:
  """Seconds per step of each candidate."""
  seconds = timer.median_seconds({name: c.run for name, c in candidates.items()})
  table = Table(title=title, title_justify="left")
  for column in ("", "start s", "step ms", "useful FLOPs"):
    table.add_column(column, justify="right" if column else "left")
  for name, candidate in candidates.items():
    milliseconds = f"{1e3 * seconds[name] / STEPS:.2f}"
    share = f"{candidate.useful_share:.0%}"
    table.add_row(name, f"{candidate.start_seconds:.1f}", milliseconds, share)
  Console(width=100).print(table)
  return {name: value / STEPS for name, value in seconds.items()}


SECTIONS = {"alike": alike, "different": different, "simulated": simulated}

if __name__ == "__main__":
  sys.exit(main())
