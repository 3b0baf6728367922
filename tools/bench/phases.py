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
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

from maxlite.phases import Alternation, Phase
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_cost import matmul_flops

NUM_BLOCKS = 4
BODY, HEAD = ["trunk/.*", "unembed/.*"], ["draft/.*"]


def make_shapes(width: int) -> dict[str, Any]:
  hidden, rank = 4 * width, width // 5
  block = {"wi": (width, hidden), "wo": (hidden, width)}
  return {
    "trunk": {f"block_{i}": block for i in range(NUM_BLOCKS)},
    "unembed": {"kernel": (width, 2 * width)},
    "draft": {"down": (width, rank), "up": (rank, width)},
  }


def hidden(params: Any, x_TD: jax.Array) -> jax.Array:
  for block in params["trunk"].values():
    x_TD += nonlinear(x_TD @ block["wi"]) @ block["wo"]
  return x_TD


def nonlinear(x: jax.Array) -> jax.Array:
  return x * jax.nn.sigmoid(x)


def draft(params: Any, x_TD: jax.Array) -> jax.Array:
  return x_TD + nonlinear(x_TD @ params["draft"]["down"]) @ params["draft"]["up"]


def fit_loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
  x_TD, targets_T = batch
  logits_TV = hidden(params, x_TD) @ params["unembed"]["kernel"]
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_TV, targets_T))


def match_loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
  x_TD = hidden(params, batch[0])
  w_DV = params["unembed"]["kernel"]
  wanted_TV = jax.nn.softmax(jax.lax.stop_gradient(x_TD @ w_DV))
  return jnp.mean(optax.softmax_cross_entropy(draft(params, x_TD) @ w_DV, wanted_TV))


def counted_flops(width: int, num_tokens: int) -> dict[str, float]:
  """By phase: a forward product, one per trained weight, one per input that needs a gradient."""
  block, unembed, head = 4 * width * width, 2 * width * width, width * (width // 5)
  fit = NUM_BLOCKS * 2 * block * 3 - block + unembed * 3  # the first input needs no gradient
  match = NUM_BLOCKS * 2 * block + unembed + head * (2 + 3) + unembed * 2
  return {"fit": 2.0 * num_tokens * fit, "match": 2.0 * num_tokens * match}


def compile_phases(params: Any, batch: Any, phases: list[Phase]) -> dict[str, Any]:
  """The compiled step and the bytes of optimizer state of each phase."""
  alternation = Alternation(phases, strategy="separate")
  state = alternation.abstract_state(params)
  alternation.compile(state, batch)
  slots = state.opt_state.own
  return {name: (step, num_bytes(slots[name])) for name, step in alternation.programs.items()}


def compile_masked(params: Any, batch: Any, *, clip: bool) -> tuple[Any, int]:
  """A step that computes all gradients and updates only the head, and its optimizer state."""
  labels = {name: "adam" if name == "draft" else "frozen" for name in params}
  tx = optax.multi_transform({"adam": optax.adam(1e-3), "frozen": optax.set_to_zero()}, labels)
  tx = optax.chain(optax.clip_by_global_norm(1.0), tx) if clip else tx

  def step(state: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], jax.Array]:
    params, opt_state = state
    loss, gradients = jax.value_and_grad(match_loss)(params, batch)
    updates, opt_state = tx.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  opt_state = jax.eval_shape(tx.init, params)
  step = jax.jit(step, donate_argnums=0).lower((params, opt_state), batch).compile()
  return step, num_bytes(opt_state)


def num_bytes(tree: Any) -> int:
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--width", type=int, default=256)
  parser.add_argument("--tokens", type=int, default=1024)
  options = parser.parse_args()
  width, num_tokens = options.width, options.tokens

  def is_shape(node):
    return isinstance(node, tuple)

  def array(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  params = jax.tree.map(array, make_shapes(width), is_leaf=is_shape)
  batch = (array((num_tokens, width)), jax.ShapeDtypeStruct((num_tokens,), jnp.int32))
  fit = Phase("fit", BODY, fit_loss, optax.adam(1e-3), steps=20)
  match = Phase("match", HEAD, match_loss, optax.adam(1e-3), steps=10)
  counted = counted_flops(width, num_tokens)
  rows = {"phase fit": (*compile_phases(params, batch, [fit, match])["fit"], counted["fit"])}
  # Compiled separately, so that the program has no optimizer state of another phase.
  rows["phase match"] = (*compile_phases(params, batch, [match])["match"], counted["match"])
  for name, clip in (("set_to_zero", False), ("clip, set_to_zero", True)):
    rows[name] = (*compile_masked(params, batch, clip=clip), counted["match"])
  report(rows, num_bytes(params), num_bytes(params["draft"]))
  return 0


def report(rows: dict[str, tuple[Any, int, float]], all_bytes: int, head_bytes: int) -> None:
  table = Table(box=None)
  for column in ("step", "GFLOP compiled", "counted", "ratio", "optimizer MiB", "temporary MiB"):
    table.add_column(column, justify="left" if column == "step" else "right")
  for name, (program, slots, counted) in rows.items():
    flops = matmul_flops(parse(program.as_text())).total
    temporary = program.memory_analysis().temp_size_in_bytes
    cells = (flops / 1e9, counted / 1e9, flops / counted, slots / 2**20, temporary / 2**20)
    table.add_row(name, *(f"{cell:.3f}" for cell in cells))
  console = Console(width=100)
  console.print(table)
  console.print(
    f"parameters: {all_bytes / 2**20:.2f} MiB, of which the head {head_bytes / 2**20:.3f} "
    f"({head_bytes / all_bytes:.1%}); {jax.devices()[0].device_kind}"
  )


if __name__ == "__main__":
  sys.exit(main())
