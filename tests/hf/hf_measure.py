"""Measure the differences from `transformers` for tiny models; see tools/fixtures/hf_parity.py.

python tests/hf/hf_measure.py [FOLDER ...] prints a row of docs/models.md for each fixture.
"""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.chunked_array import ChunkedArray
from maxlite.config.schema import DEFAULTS, ModelConfig, OptimizerConfig, build
from maxlite.hf.hf_checkpoint import params_from_hf
from maxlite.hf.hf_config import model_keys
from maxlite.hf.load_model import program_of_model
from maxlite.training.program import Program

FIXTURES = Path(__file__).resolve().parent / "hf_fixtures"
# As in tools/fixtures/hf_parity.py.
ADAMW = OptimizerConfig(
  learning_rate=1e-2,
  lr_schedule_type="constant",
  warmup_steps_fraction=0.0,
  adam_b1=0.9,
  adam_b2=0.95,
  adam_eps=1e-8,
  adam_weight_decay=0.1,
  gradient_clipping_threshold=1.0,
)
# Optimized for compile time, not run time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
# Backends that compile fastest; other tests compare them with the rest.
SIMPLEST = {"attention": "reference", "grouped_matmul": "reference", "scan_unroll": 1}


@dataclasses.dataclass(frozen=True)
class Errors:
  """Differences between both implementations.

  Attributes:
    logits: the largest error of a logit, relative to the largest logit.
    gradient: the norm of the error of the worst gradient, relative to its norm.
    worst: the parameter of that gradient.
    loss: the error of the loss before the first step.
    losses: the largest error of a loss after steps of AdamW.
  """

  logits: float
  gradient: float
  worst: str
  loss: float
  losses: float


def measure(folder: Path) -> Errors:
  """Return the Errors of the fixture in `folder`."""
  program, params, gradients = opened(folder)
  expected = load_file(folder / "expected.safetensors")
  batch = batch_of(expected)
  step = compiled_step(program)
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), program.abstract_state.opt_state)
  (loss, logits), grads, params, opt_state = step(params, zeros, batch)
  losses = [loss]
  for _ in expected["losses"][1:]:
    (loss, _), _, params, opt_state = step(params, opt_state, batch)
    losses.append(loss)
  gradient_errors = relative_errors(grads, gradients)
  worst = max(gradient_errors, key=gradient_errors.__getitem__)
  differences = np.abs(np.asarray(losses) - expected["losses"])
  return Errors(
    logits=logits_error(logits, expected),
    gradient=gradient_errors[worst],
    worst=worst,
    loss=float(differences[0]),
    losses=float(differences[1:].max()),
  )


def logits_and_loss(folder: Path) -> tuple[float, float]:
  """Return only Errors.logits and Errors.loss, in a fraction of the time."""
  program, params, _ = opened(folder)
  expected = load_file(folder / "expected.safetensors")
  loss, logits = jit(functools.partial(loss_of, program))(params, batch_of(expected))
  return logits_error(logits, expected), float(abs(loss - expected["losses"][0]))


def batch_of(expected: Any) -> tuple:
  return tuple(jnp.asarray(expected[name]) for name in ("tokens_BT", "segment_BT", "position_BT"))


def logits_error(logits: Any, expected: Any) -> float:
  want_BTV = expected["logits_BTV"]
  error = np.abs(logits - want_BTV).max()
  return float(error / np.abs(want_BTV).max())


def opened(folder: Path) -> tuple[Program, Any, Any]:
  """Return (program, parameters, gradients from `transformers`), on one device."""
  family, keys = model_keys(folder)
  model = build(ModelConfig, DEFAULTS | keys | SIMPLEST)
  program = program_of_model(model, optimizer=ADAMW)
  leaves = leaves_by_path(program.abstract_state.params)
  like = jax.tree.structure(program.abstract_state.params)

  def read(directory: Path) -> Any:
    arrays = params_from_hf(directory, family, model, model.vocab_size, leaves)
    return like.unflatten([as_numpy(arrays[path]) for path in leaves])

  return program, read(folder), read(folder / "gradients")


def as_numpy(chunked: ChunkedArray) -> np.ndarray:
  """Read all chunks; elements without data are NaN."""
  array = np.full(chunked.shape, np.nan, chunked.dtype)
  for index, chunk in chunked.chunks():
    array[index] = chunk
  return array


def loss_of(program: Program, params: Any, batch: tuple) -> tuple:
  """Return (mean loss over tokens with a next token in their document, logits_BTV)."""
  tokens_BT, segment_BT, _ = batch
  logits_BTV = program.model.apply({"params": params}, *batch)
  has_next_BT = segment_BT[:, 1:] == segment_BT[:, :-1]
  weight_BT = has_next_BT.astype(jnp.float32)
  targets_BT = tokens_BT[:, 1:]
  losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV[:, :-1], targets_BT)
  return jnp.sum(losses_BT * weight_BT) / jnp.sum(weight_BT), logits_BTV


def compiled_step(program: Program) -> Any:
  """Return step(params, opt_state, batch) -> ((loss, logits), gradients, params, opt_state)."""

  def step(params: Any, opt_state: Any, batch: tuple) -> tuple:
    loss_fn = functools.partial(loss_of, program)
    outputs, gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
    with jax.numpy_dtype_promotion("standard"):
      updates, opt_state = program.objectives[0].tx.update(gradients, opt_state, params)
    return outputs, gradients, optax.apply_updates(params, updates), opt_state

  return jit(step)


def relative_errors(ours: Any, theirs: Any) -> dict[str, float]:
  """Return the norm of the error of each leaf, relative to the norm of their leaf, by its path.

  Where keys have no rotary embedding, the gradient of their bias is zero but for rounding.
  """
  errors = {}
  expected = leaves_by_path(theirs)
  largest = max(np.linalg.norm(np.asarray(leaf)) for leaf in expected.values())
  for path, leaf in leaves_by_path(ours).items():
    want = np.asarray(expected[path])
    error = np.linalg.norm(np.asarray(leaf) - want)
    norm = np.linalg.norm(want)
    if norm < 1e-6 * largest:
      norm = largest
    errors[path] = float(error / max(norm, 1e-6))
  return errors


def main() -> None:
  folders = [Path(arg) for arg in sys.argv[1:]] or sorted(FIXTURES.iterdir())
  print("| model_type | logits | worst gradient | of | loss | six AdamW steps |")
  print("|---|---|---|---|---|---|")
  for folder in folders:
    e = measure(folder)
    print(
      f"| `{folder.name}` | {e.logits:.0e} | {e.gradient:.0e} | `{e.worst}` | {e.loss:.0e} "
      f"| {e.losses:.0e} |"
    )


if __name__ == "__main__":
  main()
