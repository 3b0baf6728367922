"""The parts of accelerator.py: `python tools/bench/accelerator_parts.py PART [name] [key=value]`.

Prints "ROW" and a JSON object per row of a table, "ERROR" and one line if the part fails, and
"SKIPPED" and the reason if it does not apply to this platform.
"""

import argparse
import importlib.metadata
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

import jax
import numpy as np
from accelerator_exchange import ExchangeSize, time_forms
from accelerator_kernels import attention, grouped_matmuls, grouped_mlps
from accelerator_rows import add_row, first_line
from step import SHAPE, random_batch, tokens_of

from maxlite.auditing.device_audit import audit_on_devices, without_features
from maxlite.config import Config, load_config
from maxlite.data.batch import Batch
from maxlite.metrics.chips import peak_bf16_tflops
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.sharding.all_to_all import check_all_to_all
from maxlite.step.gradients import GradientResult
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import step_key
from maxlite.training.program import (
  Program,
  build_objective_parts,
  build_program,
  flops_per_step,
)
from maxlite.training.spec import spec_of

ROUNDS = 5
# Of gradients in bfloat16: operands and results of every product are rounded to 8 bits.
GRADIENT_LIMIT = 0.05

SMALL_DENSE = [*SHAPE, "decoder_block=llama", "dtype=bfloat16"]
# SHAPE has 8 experts of 512, top-2, and an MLP of 1024.
SMALL_MOE = [*SMALL_DENSE, "decoder_block=mixtral"]
DENSE = [
  "decoder_block=llama",
  "dtype=bfloat16",
  "remat_policy=minimal",
  "dataset_type=synthetic",
  "base_emb_dim=2048",
  "base_num_decoder_layers=12",
  "base_mlp_dim=5632",
  "vocab_size=32000",
  "base_num_query_heads=16",
  "base_num_kv_heads=8",
  "head_dim=128",
  "max_target_length=2048",
  "per_device_batch_size=8",
]
# The active FLOPs of the experts are those of the dense MLP.
MOE = [
  *DENSE,
  "decoder_block=mixtral",
  "num_experts=16",
  "num_experts_per_tok=4",
  "base_moe_mlp_dim=1408",
]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("part", choices=PARTS)
  parser.add_argument("arguments", nargs="*")
  parser.add_argument("--small", action="store_true")
  options = parser.parse_intermixed_args()
  try:
    PARTS[options.part](options.small, *options.arguments)
  except Exception as error:  # any failure becomes one line of the table
    traceback.print_exc()
    print(f"ERROR {first_line(error)}")
    return 1
  return 0


def versions(small: bool) -> None:
  """The versions of the hardware, the platform and the libraries."""
  device = jax.devices()[0]
  add_row("versions", "devices", f"{len(jax.devices())} x {device.device_kind}")
  add_row("versions", "Python", platform.python_version())
  for name in ("jax", "jaxlib", "flax", "optax"):
    add_row("versions", name, importlib.metadata.version(name))
  add_row("versions", "platform", device.client.platform_version.splitlines()[0])
  if jax.default_backend() == "gpu":
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv"]
    found = subprocess.run(
      query,
      capture_output=True,
      text=True,
      check=False,
    )
    add_row("versions", "driver, clock, power limit", found.stdout.strip().splitlines()[-1])
  add_row("versions", "sizes", "small" if small else "full")


def exchange(small: bool) -> None:
  """The test of the ragged all-to-all that a run on several devices begins with, and times."""
  devices = jax.devices()
  num_shards = len(devices)
  degrees = [1] * len(MESH_AXES)
  degrees[MESH_AXES.index("expert")] = num_shards
  sharder = Sharder(build_mesh(degrees, [1] * len(MESH_AXES), devices))
  check_all_to_all(sharder.mesh, ("expert",))
  title = f"{num_shards} shards against its emulation"
  add_row("agreement", "ragged all-to-all", title, "float32", "0.0e+00", "0.0e+00", "0", "agrees")
  if num_shards == 1:
    return
  size = ExchangeSize(
    num_rows=49_152,
    width=2048,
    num_experts=8 * num_shards,
  )
  if small:
    size = ExchangeSize(
      num_rows=512,
      width=128,
      num_experts=2 * num_shards,
    )
  for row in time_forms(sharder.mesh, size):
    add_row("exchange", *row)


def step(small: bool, kind: str, *keys: str) -> None:
  """A training step on one batch, repeated; MFU counts the model's FLOPs.

  Args:
    small: whether the model is small enough for a CPU.
    kind: "dense" or "moe".
    keys: additional key=value of the config.
  """
  add_step_row(step_config(small, kind, keys), " ".join([kind, *keys]))


def add_step_row(cfg: Config, name: str) -> None:
  """Time the step of a config, and add its row."""
  program = build_program(spec_of(cfg), command=cfg)
  batch = random_batch(program)
  state = program.init(0)
  seconds = []
  for _ in range(2 + ROUNDS):
    start = time.perf_counter()
    state, metrics = jax.block_until_ready(program.step(state, batch))
    seconds.append(time.perf_counter() - start)
  median = statistics.median(seconds[2:])
  num_devices = len(jax.devices())
  num_tokens = tokens_of(cfg) * num_devices
  (num_flops,) = flops_per_step(program)
  add_row(
    "steps",
    f"{name} ({num_flops / 1e12:,.2f} TFLOP)",
    f"{median * 1e3:.1f}",
    f"{num_tokens / median:,.0f}",
    flops_utilization(num_flops / num_devices / median),
    peak_memory(),
    f"{float(metrics['loss']):.3f}",
  )


def batches(small: bool, kind: str, *keys: str) -> None:
  """The step with twice the rows per device, again and again until memory runs out."""
  cfg = step_config(small, kind, keys)
  rows = int(cfg.data.per_device_batch_size)
  for _ in range(2 if small else 8):
    rows *= 2
    name = f"per_device_batch_size={rows}"
    try:
      add_step_row(step_config(small, kind, (*keys, name)), f"{kind} {name}")
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      add_row("steps", f"{kind} {name}", "", "", "", "", "out of memory")
      return


def gradients(small: bool, kind: str, *keys: str) -> None:
  """A whole step's gradients, as it is compiled for training, against a float32 reference.

  The reference has the same weights and batch, no kernels, and its layers in a loop. Both replay
  the same experts, since rounded logits choose others. A backward pass that the scheduler corrupts
  shows here, although each kernel alone agrees.
  """
  fewer = (*keys, "base_num_decoder_layers=2", "per_device_batch_size=2")
  program = build_program(spec_of(step_config(small, kind, fewer)))
  plain = ("dtype=float32", "attention=reference", "grouped_matmul=reference", "scan_unroll=1")
  reference = build_program(spec_of(step_config(small, kind, (*fewer, *plain))))
  state = program.init(0)
  batch = random_batch(program)
  if kind == "moe":
    batch = with_routes(program, batch)
  got = step_gradients(program, state, batch)
  with jax.default_matmul_precision("highest"):
    want = step_gradients(reference, state, batch)
  again = step_gradients(program, state, batch)
  differences = jax.tree.map(relative_difference, got.gradients, want.gradients)
  worst_path, worst = max(jax.tree.leaves_with_path(differences), key=lambda pair: pair[1])
  loss = abs(float(got.loss) - float(want.loss)) / abs(float(want.loss))
  result = "agrees"
  if not max(worst, loss) <= GRADIENT_LIMIT:  # also if one of them is NaN
    result = f"DIFFERS in {jax.tree_util.keystr(worst_path, simple=True, separator='/')}"
  elif not all(jax.tree.leaves(jax.tree.map(np.array_equal, got.gradients, again.gradients))):
    result = "DIFFERS from run to run"
  add_row(
    "agreement",
    f"gradients of a step, {kind}",
    " ".join(keys) or "default scheduler",
    program.spec.model.dtype,
    f"{loss:.1e}",
    f"{worst:.1e}",
    f"{GRADIENT_LIMIT:.1e}",
    result,
  )


def with_routes(program: Program, batch: Batch) -> Batch:
  """The batch with experts for every token: consecutive ones, from a random one on."""
  model = program.spec.model
  shape = (*program.batch_shape, model.base_num_decoder_layers, 1)
  first_BTN1 = np.random.default_rng(1).integers(0, model.moe.num_experts, shape)
  chosen_K = np.arange(model.moe.num_experts_per_tok)
  expert_BTNK = ((first_BTN1 + chosen_K) % model.moe.num_experts).astype(np.int32)
  return batch.replace(expert_BTNK=jax.device_put(expert_BTNK, program.batch_sharding))


def step_gradients(program: Program, state: TrainState, batch: Batch) -> GradientResult:
  """The first part of the program's step, on the host."""
  parts = build_objective_parts(program, program.objectives[0])
  compiled = jax.jit(parts.gradients, compiler_options=program.compiler_options)
  result = compiled(state.params, state.collections, batch, step_key(state))
  return jax.device_get(result)


def relative_difference(got: np.ndarray, want: np.ndarray) -> float:
  """The Euclidean norm of the difference, relative to that of `want`."""
  norm = float(np.linalg.norm(np.ravel(want).astype(np.float64)))
  difference = np.ravel(got).astype(np.float64) - np.ravel(want).astype(np.float64)
  return float(np.linalg.norm(difference)) / max(norm, 1e-30)


def shares(small: bool, kind: str, *keys: str) -> None:
  """The times of the loss, of loss and gradients, and of the update, against the whole step."""
  cfg = step_config(small, kind, keys)
  program = build_program(spec_of(cfg), command=cfg)
  objective = program.objectives[0]
  parts = build_objective_parts(program, objective)
  batch = random_batch(program)
  state = program.init(0)
  options = program.compiler_options

  def loss(state: TrainState, batch: Batch) -> jax.Array:
    return parts.gradients(state.params, state.collections, batch, step_key(state)).loss

  def first_part(state: TrainState, batch: Batch) -> GradientResult:
    return parts.gradients(state.params, state.collections, batch, step_key(state))

  forward = jax.jit(loss, compiler_options=options)  # XLA removes what the loss does not need
  backward = jax.jit(first_part, compiler_options=options)
  gradients_ms = milliseconds(lambda: backward(state, batch))
  forward_ms = milliseconds(lambda: forward(state, batch))
  result = backward(state, batch)
  update = jax.jit(parts.update, donate_argnums=0, compiler_options=options)
  holder = [state]

  def run_update() -> TrainState:
    holder[0], _ = update(holder[0], result)
    return holder[0]

  update_ms = milliseconds(run_update)
  whole = gradients_ms + update_ms
  for part, part_ms in (
    ("forward pass and loss", forward_ms),
    ("backward pass", gradients_ms - forward_ms),
    ("update", update_ms),
  ):
    add_row("shares", " ".join([kind, *keys]), part, f"{part_ms:.1f}", f"{part_ms / whole:.1%}")


def milliseconds(run: Callable[[], object]) -> float:
  """The median time of a call, after two that are not counted."""
  seconds = []
  for _ in range(2 + ROUNDS):
    start = time.perf_counter()
    jax.block_until_ready(run())
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds[2:]) * 1e3


def audit(small: bool, kind: str, *keys: str) -> None:
  """The gradients of a whole step on all devices, as maxlite.audit compares them."""
  cfg = step_config(small, kind, keys)
  spec, _ = without_features(spec_of(cfg))
  for each in audit_on_devices(spec):
    if each.not_possible:
      continue
    result = "agrees"
    if each.problem:
      result = f"DIFFERS: {each.problem}"
    add_row(
      "agreement",
      f"whole step, {kind}",
      each.variant,
      cfg.model.dtype,
      f"{each.loss:.1e}",
      f"{each.gradients:.1e}",
      f"{each.limit:.1e}",
      result,
    )


def step_config(
  small: bool,
  kind: str,
  keys: tuple[str, ...],
) -> Config:
  if kind == "moe":
    shape = SMALL_MOE if small else MOE
  else:
    shape = SMALL_DENSE if small else DENSE
  return load_config([*shape, *keys])


def flops_utilization(flops_per_second: float) -> str:
  """The share of the peak FLOP/s of a device; empty if the peak is unknown."""
  peak_tflops = peak_bf16_tflops(jax.devices()[0].device_kind)
  if not peak_tflops:
    return ""
  return f"{flops_per_second / peak_tflops / 1e10:.1f} %"


def peak_memory() -> str:
  """The peak memory of the first device [GB]; empty if it is unknown."""
  stats = jax.devices()[0].memory_stats() or {}
  num_bytes = stats.get("peak_bytes_in_use", 0)
  if not num_bytes:
    return ""
  return f"{num_bytes / 1e9:.1f}"


PARTS = {
  "versions": versions,
  "attention": attention,
  "grouped_matmul": grouped_matmuls,
  "grouped_mlp": grouped_mlps,
  "exchange": exchange,
  "step": step,
  "batches": batches,
  "gradients": gradients,
  "shares": shares,
  "audit": audit,
}

if __name__ == "__main__":
  sys.exit(main())
