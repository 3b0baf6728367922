"""HLO analysis of small programs compiled for 8 CPU devices, and of a TPU program."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.planning.hlo import parse
from maxlite.planning.hlo_collectives import Collective, collectives
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.planning.hlo_traffic import hbm_traffic

MESH_SHAPE = {"data": 2, "fsdp": 4}
PAYLOAD = 8 * 16 * 4  # bytes of a shard of `local_program`'s argument

# Forms that XLA:CPU never prints: asynchronous pairs, XLA:TPU's reduce-scatter, on-chip memory and
# matmuls as convolutions, loops whose counter grows by 2, the third notation of device groups, and
# transfers between slices.
TPU_STEP = Path(__file__).with_name("tpu_step.hlo.txt")


@pytest.fixture(scope="module")
def mesh():
  return jax.sharding.Mesh(np.reshape(jax.devices(), (2, 4)), tuple(MESH_SHAPE))


def compiled(function, *shapes):
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return jax.jit(function).lower(*args).compile()


def module_of(function, *shapes):
  return parse(compiled(function, *shapes).as_text())


def on_shards(mesh, local):
  """`local` on the [8, 16] shards of an [8 * 8, 16] array."""
  spec = jax.P(("data", "fsdp"))
  # Unchecked, so that a loop may carry a value that its first iteration reduces; not executed.
  return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def repeated(local, times):
  def body(x, _):
    return local(x), None

  return lambda x: jax.lax.scan(body, x, length=times)[0]


@pytest.mark.parametrize(
  ("mesh_axes", "size"), [(("fsdp",), 4), (("data",), 2), (("data", "fsdp"), 8)]
)
def test_a_collective_in_a_loop_counts_once_per_iteration(mesh, mesh_axes, size):
  local = repeated(lambda x: jnp.sin(jax.lax.psum(x, mesh_axes)), 5)
  found = collectives(module_of(on_shards(mesh, local), (64, 16)), MESH_SHAPE)
  sent = 5 * PAYLOAD * 2 * (size - 1) / size
  assert found == [Collective("all-reduce", mesh_axes, 5, 5 * PAYLOAD, sent)]


@pytest.mark.parametrize(
  ("kind", "local", "payload", "sent"),
  [
    ("all-gather", lambda x: jax.lax.all_gather(x, "fsdp"), 4 * PAYLOAD, 3 * PAYLOAD),
    (
      "reduce-scatter",
      lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True),
      PAYLOAD,
      0.75 * PAYLOAD,
    ),
    (
      "all-to-all",
      lambda x: jax.lax.all_to_all(x, "fsdp", 0, 1, tiled=True),
      PAYLOAD,
      0.75 * PAYLOAD,
    ),
    (
      "collective-permute",
      lambda x: jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
      PAYLOAD,
      PAYLOAD,
    ),
  ],
)
def test_every_kind_of_collective(mesh, kind, local, payload, sent):
  module = module_of(on_shards(mesh, local), (64, 16))
  assert collectives(module, MESH_SHAPE) == [Collective(kind, ("fsdp",), 1, payload, sent)]


def test_matmuls_in_nested_loops():
  def turn(x, w):
    return jnp.tanh(x @ w)

  def program(x, w):
    def outer_turn(_, x):
      return jax.lax.fori_loop(0, 3, lambda _, x: turn(x, w), x) + turn(x, w)

    return jax.lax.fori_loop(0, 4, outer_turn, x)

  module = module_of(program, (16, 32), (32, 32))
  assert matmul_flops(module) == (4 * (3 + 1) * 2 * 16 * 32 * 32, 0)
  assert module.unknown_loops == 0


@pytest.mark.parametrize("branch", ["pred", "index"])
def test_branches_count_by_their_share(branch):
  three_times = repeated(lambda x: jnp.tanh(x @ x), 3)
  seven_times = repeated(lambda x: jnp.tanh(x @ x), 7)

  def program(x):
    if branch == "pred":
      return jax.lax.cond(x[0, 0] > 0, three_times, seven_times, x)
    return jax.lax.switch(x[0, 0].astype(int), [seven_times, three_times], x)

  text = compiled(jax.named_scope("branch_scope")(program), (16, 16)).as_text()
  product = 2 * 16**3
  assert matmul_flops(parse(text)).total == (3 + 7) * product
  assert matmul_flops(parse(text, true_share=0.75)).total == (0.75 * 3 + 0.25 * 7) * product
  share = {"branch_scope": 0.25}
  assert matmul_flops(parse(text, 0.75, share)).total == (0.25 * 3 + 0.75 * 7) * product
  assert matmul_flops(parse(text, 0.75, {"other": 0.25})) == matmul_flops(parse(text, 0.75))


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
  def program(x, w):
    return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: jnp.tanh(x @ w), x)

  module = module_of(program, (16, 32), (32, 32))
  assert matmul_flops(module).total == 2 * 16 * 32 * 32
  assert module.unknown_loops == 1


@pytest.mark.parametrize("dilate", [(1, 1), (3, 2)])
@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((2, 1), (0, 3))])
def test_a_convolution_does_not_multiply_by_padding(dilate, padding):
  def program(x, w):
    return jax.lax.conv_general_dilated(x, w, (2, 1), padding, lhs_dilation=dilate)

  shapes = (2, 3, 9, 8), (5, 3, 4, 2)
  ones = [jnp.ones(shape) for shape in shapes]
  products = float(jnp.sum(program(*ones)))  # with ones as inputs, each product adds one
  assert matmul_flops(module_of(program, *shapes)) == (2 * products, 0)


def hbm_bytes(module):
  return sum(part.num_bytes for part in hbm_traffic(module))


def test_hbm_bytes_equal_the_compilers():
  program = compiled(lambda x, w: jnp.tanh(x @ w).sum(axis=0) + 1, (256, 512), (512, 128))
  assert hbm_bytes(parse(program.as_text())) == pytest.approx(
    program.cost_analysis()["bytes accessed"], rel=0.05
  )


def test_a_loop_counts_its_slices_only():
  def rows(x):
    return jax.lax.scan(lambda total, row: (total + row, jnp.sin(row)), x[0], x)

  once = 64 * 4096 * 4  # bytes of x, which is read once; its sine is written once
  assert 2 * once <= hbm_bytes(module_of(rows, (64, 4096))) < 8 * once


def test_forms_that_only_tpus_print():
  module = parse(TPU_STEP.read_text())
  turns = math.ceil((7 - 2) / 2)
  rows = 512 * 8 * 4
  assert module.unknown_loops == 0
  found = collectives(module, MESH_SHAPE, {"data": 2})
  assert {(c.kind, c.mesh_axes): c[2:] for c in found} == {
    ("reduce-scatter", ("fsdp",)): (turns, turns * rows, turns * rows * 3 / 4, False, 0),
    ("all-gather", ("fsdp",)): (turns, turns * rows, turns * rows * 3 / 4, False, turns),
    ("ragged-all-to-all", ("fsdp",)): (1, rows, rows * 3 / 4, False, 0),
    ("all-reduce", ("data",)): (turns, turns * rows, turns * rows, True, turns),
  }
  assert matmul_flops(module) == (1000 * 512 / 4096 + 2 * 512 * 64 * 8, 0)
