"""HBM bytes of small programs: forms that only TPUs print, and XLA's own count of a step."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from maxlite.kernels.stated_cost import StatedCost, stated_cost
from maxlite.metrics.chips import CHIPS
from maxlite.planning import plan_report
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_collectives import Collective, collectives
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.planning.hlo_traffic import hbm_traffic
from maxlite.planning.roofline import step_bounds

# A row updated in place and read by nested fusions, buffers without contents, an asynchronous
# permute, a slice into on-chip memory, a gather that the SparseCore runs, and a kernel on a receive
# buffer that is a quarter full.
TPU_PROGRAM = Path(__file__).with_name("tpu_traffic.hlo.txt").read_text()
ROW = 128 * 4
# An all-gather that starts in one fusion, proceeds in that of a matmul, and ends in a third.
CHAINED_PROGRAM = Path(__file__).with_name("tpu_chained.hlo.txt").read_text()


def test_forms_that_only_tpus_print():
  module = parse(TPU_PROGRAM, package_folder="/clones/maxlite")
  traffic = hbm_traffic(module)
  assert [(part.category, part.num_bytes) for part in traffic] == [
    ("element-wise", pytest.approx(2 * 8 * ROW, abs=8)),  # reads and writes the updated rows
    ("collectives", 2 * 4096 * ROW),
    ("kernels", 400 / 4 + 7),
    ("collectives", 2 * 4096 * ROW),
    ("slices and updates", 16 * ROW),  # written to on-chip memory
    ("copies", 2 * 4096 * ROW),
    ("gathers and scatters", 2 * 16 * ROW),
  ]
  assert [part.source for part in traffic] == ["layers/a.py:5", *[""] * 6]
  assert matmul_flops(module) == (1000, 0)


def test_asynchronous_collectives_are_not_exposed():
  permute, exchange = collectives(parse(TPU_PROGRAM), {"expert": 4})
  assert (permute.kind, permute.async_times, permute.exposed_bytes) == ("collective-permute", 1, 0)
  assert (exchange.async_times, exchange.exposed_bytes) == (0, exchange.sent_bytes)


def test_a_collective_continued_in_a_matmul_counts_once():
  module = parse(CHAINED_PROGRAM)
  gathered = 256 * 256 * 2
  (gather,) = collectives(module, {"fsdp": 4})
  assert (gather.times, gather.async_times, gather.payload_bytes) == (1, 1, gathered)
  start, between, done = hbm_traffic(module)
  assert (start.category, start.num_bytes) == ("collectives", 1.25 * gathered)
  assert (between.category, between.num_bytes) == ("matmuls", 2 * 512 * 256 + 4 * 512 * 512)
  assert done.num_bytes == 0
  assert matmul_flops(module).total == 2 * 512 * 512 * 256


NESTED_VIEW = """HloModule step, is_scheduled=true

%view (a: bf16[4,128,256]) -> bf16[512,256] {
  %a = bf16[4,128,256]{2,1,0} parameter(0)
  ROOT %flat = bf16[512,256]{1,0} bitcast(%a)
}

%rows (b: bf16[4,128,256], i: s32[]) -> bf16[64,256] {
  %b = bf16[4,128,256]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %viewed = bf16[512,256]{1,0} fusion(%b), kind=kLoop, calls=%view
  ROOT %some = bf16[64,256]{1,0} dynamic-slice(%viewed, %i, %i), dynamic_slice_sizes={64,256}
}

%product (c: bf16[4,128,256], d: bf16[256,64]) -> bf16[512,64] {
  %c = bf16[4,128,256]{2,1,0} parameter(0)
  %d = bf16[256,64]{1,0} parameter(1)
  %viewed = bf16[512,256]{1,0} fusion(%c), kind=kLoop, calls=%view
  ROOT %y = bf16[512,64]{1,0} dot(%viewed, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[4,128,256], w: bf16[256,64], n: s32[]) -> bf16[512,64] {
  %x = bf16[4,128,256]{2,1,0} parameter(0)
  %w = bf16[256,64]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %sliced = bf16[64,256]{1,0} fusion(%x, %n), kind=kLoop, calls=%rows
  ROOT %z = bf16[512,64]{1,0} fusion(%x, %w), kind=kOutput, calls=%product
}
"""


def test_what_a_nested_fusion_views_counts_as_its_users_read_it():
  sliced, product = hbm_traffic(parse(NESTED_VIEW))
  assert sliced.num_bytes == 2 * 2 * 64 * 256 + 4  # reads and writes the rows, reads the index
  assert product.num_bytes == 2 * (4 * 128 * 256 + 256 * 64 + 512 * 64)


CONVERTED_SLICE = """HloModule step, is_scheduled=true

%layer (a: f32[12,128,256]) -> bf16[128,256] {
  %a = f32[12,128,256]{2,1,0} parameter(0)
  %converted = bf16[12,128,256]{2,1,0} convert(%a)
  %sliced = bf16[1,128,256]{2,1,0} slice(%converted), slice={[3:4], [0:128], [0:256]}
  ROOT %row = bf16[128,256]{1,0} bitcast(%sliced)
}

ENTRY %main (x: f32[12,128,256]) -> bf16[128,256] {
  %x = f32[12,128,256]{2,1,0} parameter(0)
  ROOT %first = bf16[128,256]{1,0} fusion(%x), kind=kLoop, calls=%layer
}
"""


def test_a_conversion_in_a_fusion_reads_what_its_users_read():
  (part,) = hbm_traffic(parse(CONVERTED_SLICE))
  assert part.num_bytes == 128 * 256 * (4 + 2)


def test_lines_of_other_packages_in_the_clone_are_not_sources():
  """The clone, too, has the name of the package, and often holds the virtual environment."""
  inside = '"/clones/maxlite/.venv/lib/python3/site-packages/kernels/b.py"'
  text = TPU_PROGRAM.replace('"/usr/lib/python3/site-packages/kernels/b.py"', inside)
  text = text.replace("/clones/maxlite/layers", "/clones/maxlite/maxlite/layers")
  module = parse(text, package_folder="/clones/maxlite/maxlite")
  assert module.sources == {1: "layers/a.py:5", 2: "layers/a.py:5"}


def test_a_kernel_without_a_stated_cost_leaves_the_bound_open():
  text = TPU_PROGRAM.replace("cost_flops4000_rows400_fixed7/", "").replace("cost_estimate", "none")
  assert matmul_flops(parse(text)).kernels_unknown == 1
  bounds = step_bounds(CHIPS["TPU v5"], 1e12, 1e9, [])
  complete = plan_report.roofline_lines(bounds, 0.5, 0.0, is_complete=True)
  assert "MFU" in complete[-1]
  incomplete = plan_report.roofline_lines(bounds, 0.5, 0.0, is_complete=False)
  assert not any("MFU" in line for line in incomplete)


def test_sends_of_synchronous_collectives_lower_the_bound():
  exchange = Collective("all-gather", ("fsdp",), 4, 4e9, 3e9, async_times=1)
  assert exchange.exposed_bytes == 0.75 * 3e9
  bounds = step_bounds(CHIPS["TPU v5"], 459e12, None, [exchange])
  lines = plan_report.roofline_lines(bounds, 0.5, 1.0, is_complete=True)
  assert lines[-2].endswith("MFU is at most 50.0%")
  assert lines[-1].endswith("MFU is at most 25.0%")


def test_the_cost_of_a_kernel_is_in_the_compiled_program():
  def scaled(x):
    with stated_cost(StatedCost(12.0, 34, 56)):
      return x * jnp.sin(x)

  text = jax.jit(scaled).lower(jnp.ones(8)).compile().as_text()
  assert "cost_flops12_rows34_fixed56" in text


def test_the_bytes_of_a_loop_free_step_equal_the_compilers():
  optimizer = optax.adamw(1e-3)
  widths = (256, 512, 512, 64)

  def loss(weights, x):
    for w in weights:
      x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

  def step(weights, state, x):
    updates, state = optimizer.update(jax.grad(loss)(weights, x), state, weights)
    return optax.apply_updates(weights, updates), state

  weights = [jnp.ones(shape) for shape in itertools.pairwise(widths)]
  with jax.numpy_dtype_promotion("standard"):  # of Optax
    lowered = jax.jit(step).lower(weights, optimizer.init(weights), jnp.ones((512, 256)))
  program = lowered.compile()
  expected = program.cost_analysis()["bytes accessed"]
  moved = sum(part.num_bytes for part in hbm_traffic(parse(program.as_text())))
  assert moved == pytest.approx(expected, rel=0.1)


def test_with_loops_once_the_bytes_of_a_scan_equal_the_compilers():
  def layers(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), jnp.sum(x)), x, weights)

  shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 256), (8, 256, 256))]
  program = jax.jit(layers).lower(*shapes).compile()
  expected = program.cost_analysis()["bytes accessed"]
  module = parse(program.as_text())
  once = sum(part.num_bytes for part in hbm_traffic(module.with_loops_once()))
  assert once == pytest.approx(expected, rel=0.1)
  assert sum(part.num_bytes for part in hbm_traffic(module)) > 6 * once
  assert plan_report.compare_traffic(101e9, 100e9) == (
    "  with loops counted once: 101.000 GB, by XLA's cost analysis 100.000 GB (+1.0%)"
  )
