"""Cost of each phase of alternating training: compiled and expected matmul FLOPs, and memory.

  python tools/bench/phases.py [--width 256] [--tokens 1024]

The model is a decoder of matmuls (residual blocks and an unembedding) with a draft head of one
percent of its parameters, trained with Adam. Phase `fit` trains all parameters except the head,
`match` only the head. The comparison is the usual alternative: gradients of all parameters, and an
optimizer that updates only the head (`optax.set_to_zero` for the rest), with and without clipping
by the global norm.
"""

import argparse
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

from maxlite.phases import Alternation, Phase
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.sharding.pytree import PyTree

NUM_BLOCKS = 4
# Regexes of the parameters that each phase trains.
BODY = ["trunk/.*", "unembed/.*"]
HEAD = ["draft/.*"]


class Measured(NamedTuple):
  """The step of one row of the table.

  Attributes:
    program: the compiled step.
    slot_bytes: bytes of its optimizer state.
    counted_flops: FLOPs of its matmuls, counted by hand.
  """

  program: jax.stages.Compiled
  slot_bytes: int
  counted_flops: float


def make_shapes(width: int) -> dict[str, Any]:
  hidden = 4 * width
  rank = width // 5
  block = {"wi": (width, hidden), "wo": (hidden, width)}
  return {
    "trunk": {f"block_{i}": block for i in range(NUM_BLOCKS)},
    "unembed": {"kernel": (width, 2 * width)},
    "draft": {"down": (width, rank), "up": (rank, width)},
  }


def hidden(params: PyTree, x_TD: jax.Array) -> jax.Array:
  for block in params["trunk"].values():
    x_TD += nonlinear(x_TD @ block["wi"]) @ block["wo"]
  return x_TD


def nonlinear(x: jax.Array) -> jax.Array:
  return x * jax.nn.sigmoid(x)


def draft(params: PyTree, x_TD: jax.Array) -> jax.Array:
  head = params["draft"]
  return x_TD + nonlinear(x_TD @ head["down"]) @ head["up"]


def fit_loss(params: PyTree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
  x_TD, targets_T = batch
  logits_TV = hidden(params, x_TD) @ params["unembed"]["kernel"]
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_TV, targets_T))


def match_loss(params: PyTree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
  x_TD = hidden(params, batch[0])
  w_DV = params["unembed"]["kernel"]
  target_logits_TV = jax.lax.stop_gradient(x_TD @ w_DV)
  wanted_TV = jax.nn.softmax(target_logits_TV)
  logits_TV = draft(params, x_TD) @ w_DV
  return jnp.mean(optax.softmax_cross_entropy(logits_TV, wanted_TV))


def counted_flops(width: int, num_tokens: int) -> dict[str, float]:
  """By phase: a forward product, one per trained weight, one per input that needs a gradient."""
  block = 4 * width * width
  unembed = 2 * width * width
  head = width * (width // 5)
  blocks = NUM_BLOCKS * 2 * block
  # All weights are trained; the first input needs no gradient.
  fit = blocks * 3 - block + unembed * 3
  # The hidden states are only computed. The head has two products and their gradients, except for
  # the gradient of its input; the unembedding is applied to the hidden states and to the head.
  match = blocks + unembed + head * (2 + 3) + unembed * 2
  flops_of_weight = 2.0 * num_tokens
  return {"fit": flops_of_weight * fit, "match": flops_of_weight * match}


def compile_phase(
  phases: list[Phase],
  name: str,
  params: PyTree,
  batch: PyTree,
  counted_flops: float,
) -> Measured:
  """The compiled step of the phase `name`, in a run of `phases`."""
  alternation = Alternation(phases, strategy="separate")
  state = alternation.abstract_state(params)
  alternation.compile(state, batch)
  slot_bytes = num_bytes(state.opt_state.own[name])
  return Measured(alternation.programs[name], slot_bytes, counted_flops)


def compile_masked(
  params: PyTree,
  batch: PyTree,
  counted_flops: float,
  *,
  clip: bool,
) -> Measured:
  """A step that computes all gradients and updates only the head."""
  labels = dict.fromkeys(params, "frozen") | {"draft": "adam"}
  transforms = {"adam": optax.adam(1e-3), "frozen": optax.set_to_zero()}
  tx = optax.multi_transform(transforms, labels)
  if clip:
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)

  def step(state: tuple[PyTree, PyTree], batch: PyTree) -> tuple[PyTree, jax.Array]:
    params, opt_state = state
    loss, gradients = jax.value_and_grad(match_loss)(params, batch)
    updates, opt_state = tx.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  opt_state = jax.eval_shape(tx.init, params)
  lowered = jax.jit(step, donate_argnums=0).lower((params, opt_state), batch)
  return Measured(lowered.compile(), num_bytes(opt_state), counted_flops)


def num_bytes(tree: PyTree) -> int:
  total = 0
  for leaf in jax.tree.leaves(tree):
    total += leaf.size * leaf.dtype.itemsize
  return total


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--width", type=int, default=256)
  parser.add_argument("--tokens", type=int, default=1024)
  options = parser.parse_args()
  width = options.width
  num_tokens = options.tokens
  shapes = make_shapes(width)
  params = jax.tree.map(float_array, shapes, is_leaf=lambda x: isinstance(x, tuple))
  targets_T = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
  batch = (float_array((num_tokens, width)), targets_T)
  fit = Phase(
    "fit",
    BODY,
    fit_loss,
    optax.adam(1e-3),
    steps=20,
  )
  match = Phase(
    "match",
    HEAD,
    match_loss,
    optax.adam(1e-3),
    steps=10,
  )
  flops = counted_flops(width, num_tokens)
  rows = {
    "phase fit": compile_phase([fit, match], "fit", params, batch, flops["fit"]),
    # Compiled separately, so that the program has no optimizer state of another phase.
    "phase match": compile_phase([match], "match", params, batch, flops["match"]),
    "set_to_zero": compile_masked(params, batch, flops["match"], clip=False),
    "clip, set_to_zero": compile_masked(params, batch, flops["match"], clip=True),
  }
  report(rows, num_bytes(params), num_bytes(params["draft"]))
  return 0


def float_array(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def report(
  rows: dict[str, Measured],
  all_bytes: int,
  head_bytes: int,
) -> None:
  """Print a table with a row per step."""
  table = Table(box=None)
  table.add_column("step", justify="left")
  for column in ("GFLOP compiled", "counted", "ratio", "optimizer MiB", "temporary MiB"):
    table.add_column(column, justify="right")
  for name, measured in rows.items():
    flops = matmul_flops(parse(measured.program.as_text())).total
    temporary_bytes = measured.program.memory_analysis().temp_size_in_bytes
    table.add_row(
      name,
      f"{flops / 1e9:.3f}",
      f"{measured.counted_flops / 1e9:.3f}",
      f"{flops / measured.counted_flops:.3f}",
      f"{measured.slot_bytes / 2**20:.3f}",
      f"{temporary_bytes / 2**20:.3f}",
    )
  console = Console(width=100)
  console.print(table)
  all_mib = all_bytes / 2**20
  head_mib = head_bytes / 2**20
  device = jax.devices()[0].device_kind
  console.print(
    f"parameters: {all_mib:.2f} MiB, of which the head {head_mib:.3f} "
    f"({head_bytes / all_bytes:.1%}); {device}"
  )


if __name__ == "__main__":
  sys.exit(main())
