"""Tile sizes of grouped matmul kernels: the caller's choice, and the default for Megablox.

Megablox multiplies [M, K] rows by [K, N] matrices (`fwd`, `dlhs`), or sums outer products of M rows
into [K, N] matrices (`drhs`). A larger tile is fetched less often but must fit in VMEM, and the
part of a tile beyond its group or its matrix is wasted work. `choose_tiles` enumerates the tiles
that fit and takes the fastest one by a roofline estimate.
"""

import functools
import itertools
from typing import NamedTuple, TypeVar

from maxlite.kernels.numerics import ceil_div

Tile = tuple[int, int, int]  # rows, D, F


class Tiles(NamedTuple):
  """Tile of each pass of a tiled kernel; None: the kernel's choice.

  D and F are the axes of the weight w_GDF in question: for the output projection of an MLP, D is
  the hidden axis and F the model axis.
  """

  fwd: Tile | None = None
  dlhs: Tile | None = None  # the gradient of x
  drhs: Tile | None = None  # the gradient of w
  # The kernel chooses as for this number of rows, so that arrays of different sizes have the same
  # tiles, and their sums the same order; None: for the number of rows that it gets.
  num_rows: int | None = None


class ChosenTiles(NamedTuple):
  """`Tiles` in which none is None."""

  fwd: Tile
  dlhs: Tile
  drhs: Tile


DEFAULT_TILES = Tiles()
_TileOrNone = TypeVar("_TileOrNone", Tile, Tile | None)


def transpose_tile(tile: _TileOrNone) -> _TileOrNone:
  """The tile (rows, F, D) for the product with the transposed weight."""
  if tile is None:
    return None
  rows, d, f = tile
  return rows, f, d


class TpuSpec(NamedTuple):
  """One JAX device: published figures, and the memory that the compiler grants one kernel."""

  num_cores: int  # sharing the parallel axis (N) of a kernel's grid
  vmem_mib: int  # per core, without compiler flags
  peak_tflops: float  # bfloat16
  hbm_gbps: float


TPU_SPECS = {  # by jax.Device.device_kind
  "TPU v4": TpuSpec(2, 16, 275, 1228),
  "TPU v5 lite": TpuSpec(1, 16, 197, 819),
  "TPU v5": TpuSpec(2, 16, 459, 2765),  # v5p
  "TPU v6 lite": TpuSpec(1, 32, 918, 1640),
  "TPU7x": TpuSpec(1, 32, 1153.5, 3690),
}
_FALLBACK = TPU_SPECS["TPU v5 lite"]  # its tiles fit every TPU
_LANES = 128  # a tile's axes are multiples of this, or whole
_ROW_TILES = (128, 256, 512, 1024)
_VMEM_MARGIN = 0.9  # share of VMEM to use, because `_vmem_bytes` is an estimate
_STEP_SECONDS = 0.35e-6  # overhead per step of a kernel's grid


class _Problem(NamedTuple):
  """Work of one pass: M rows in groups, and the matrix axes K and N in the kernel's order."""

  num_rows: int
  num_groups: int
  k: int
  n: int
  row_bytes: int  # per element of x, y and the matrices that are read
  sum_bytes: int  # per element of the matrices that are summed; 0: they are read


def choose_tiles(
  m: int, groups: int, d: int, f: int, row_bytes: int, weight_bytes: int, device_kind: str
) -> ChosenTiles:
  """The tiles of all passes for x_MD and w_GDF, whose elements have these sizes in bytes."""
  spec = TPU_SPECS.get(device_kind, _FALLBACK)
  fwd = _Problem(m, groups, k=d, n=f, row_bytes=row_bytes, sum_bytes=0)
  dlhs = _Problem(m, groups, k=f, n=d, row_bytes=row_bytes, sum_bytes=0)
  drhs = _Problem(m, groups, k=d, n=f, row_bytes=row_bytes, sum_bytes=weight_bytes)
  return ChosenTiles(
    fwd=_fastest(fwd, spec),
    dlhs=transpose_tile(_fastest(dlhs, spec)),
    drhs=_fastest(drhs, spec),
  )


@functools.cache
def _fastest(problem: _Problem, spec: TpuSpec) -> Tile:
  """The tile with the least `_seconds` of those that fit into VMEM."""
  limit = _VMEM_MARGIN * spec.vmem_mib * 2**20
  tiles = itertools.product(_heights(problem.num_rows), _widths(problem.k), _widths(problem.n))
  fitting = [tile for tile in tiles if _vmem_bytes(problem, tile) <= limit]
  return min(fitting, key=lambda tile: _seconds(problem, tile, spec))


def _heights(num_rows: int) -> list[int]:
  """The rows of a tile to choose from."""
  heights = [height for height in _ROW_TILES if height <= num_rows]
  if not heights:
    return [_round_up(num_rows, 16)]
  dividing = [height for height in heights if num_rows % height == 0]
  if dividing:
    return dividing
  return heights  # the rows will be copied into a padded buffer


def _widths(dim: int) -> list[int]:
  """The smallest tile for each number of tiles along an axis, largest (the whole axis) first."""
  widths = set()
  for num_tiles in range(1, ceil_div(dim, _LANES) + 1):
    width = _round_up(ceil_div(dim, num_tiles), _LANES)
    widths.add(min(dim, width))
  return sorted(widths, reverse=True)


def _vmem_bytes(problem: _Problem, tile: Tile) -> int:
  """Estimated VMEM: two buffers per operand and result, the accumulator, and spills."""
  m, k, n = tile
  if problem.sum_bytes:
    rows = 2 * problem.row_bytes * (m * k + m * n)
    sums = (2 * problem.sum_bytes + 4) * k * n
    spilled = 4 * m * k  # masked rows, transposed in float32
    return rows + sums + spilled
  operands = 2 * problem.row_bytes * (m * k + k * n + m * n)
  accumulator = 4 * m * n
  spilled = 4 * m * n  # the product, before it is accumulated
  return operands + accumulator + spilled


def _seconds(problem: _Problem, tile: Tile, spec: TpuSpec) -> float:
  """Estimated time: the slower of arithmetic and memory, idle cores, and grid steps."""
  m, k, n = tile
  visits = ceil_div(problem.num_rows, m) + problem.num_groups - 1
  cuts_k = ceil_div(problem.k, k)
  cuts_n = ceil_div(problem.n, n)
  steps = visits * cuts_k * cuts_n
  if problem.sum_bytes:
    moved = problem.row_bytes * steps * (m * k + m * n)
    moved += problem.sum_bytes * problem.num_groups * problem.k * problem.n
  else:
    fetches = steps
    if cuts_k == 1:  # a matrix that K does not cut stays in VMEM for all tiles of its group
      fetches = problem.num_groups * cuts_n
    moved = problem.row_bytes * (steps * m * k + fetches * k * n + visits * cuts_n * m * n)
  arithmetic = 2 * steps * m * k * n / (spec.peak_tflops * 1e12)
  idle = ceil_div(cuts_n, spec.num_cores) * spec.num_cores / cuts_n
  busy = max(arithmetic, moved / (spec.hbm_gbps * 1e9))
  return idle * (busy + steps * _STEP_SECONDS / spec.num_cores)


def _round_up(a: int, b: int) -> int:
  return ceil_div(a, b) * b
