"""Tiles of grouped matmul kernels: what a caller may ask for, and Megablox' own choice.

Megablox multiplies [M, K] rows with [K, N] matrices (`fwd`, `dlhs`), or sums outer products of M
rows into [K, N] matrices (`drhs`). A larger tile is fetched less often, but must fit VMEM, and what
a tile reaches beyond its group or its matrix is work for nothing. `choose_tiles` lists the tiles
that fit and takes the one that a roofline estimate calls fastest.
"""

import functools
import itertools
from typing import NamedTuple

Tile = tuple[int, int, int]  # rows, D, F


class Tiles(NamedTuple):
  """Tile of each pass of a kernel that works in tiles; None: the kernel's own choice.

  D and F are the axes of the weight w_GDF at hand: of a projection back to the model's width, D is
  the hidden axis and F the model's.
  """

  fwd: Tile | None = None
  dlhs: Tile | None = None  # the gradient of x
  drhs: Tile | None = None  # the gradient of w


DEFAULT_TILES = Tiles()


class Chip(NamedTuple):
  """One JAX device, as its maker publishes it, and what its compiler grants one kernel."""

  num_cores: int  # that share the parallel axis (N) of a kernel's grid
  vmem_mib: int  # of a core, without compiler flags
  peak_tflops: float  # bfloat16
  hbm_gbps: float


CHIPS = {  # by jax.Device.device_kind
  "TPU v4": Chip(2, 16, 275, 1228),
  "TPU v5 lite": Chip(1, 16, 197, 819),
  "TPU v5": Chip(2, 16, 459, 2765),  # v5p
  "TPU v6 lite": Chip(1, 32, 918, 1640),
  "TPU7x": Chip(1, 32, 1153.5, 3690),
}
_FALLBACK = CHIPS["TPU v5 lite"]  # its tiles fit every chip
_LANES = 128  # a tile's axes are multiples of this, or whole
_ROW_TILES = (128, 256, 512, 1024)
_VMEM_MARGIN = 0.9  # of what is granted; `_vmem_bytes` is an estimate
_STEP_SECONDS = 0.35e-6  # of a kernel's grid, beside its arithmetic and copies


class _Problem(NamedTuple):
  """Work of one pass: M rows in groups, and the matrix axes K and N as its kernel sees them."""

  num_rows: int
  num_groups: int
  k: int
  n: int
  row_bytes: int  # of one number of x, y and the matrices that are read
  sum_bytes: int  # of one number of the matrices that are summed; 0: they are read


def choose_tiles(
  num_rows: int,
  num_groups: int,
  num_in: int,
  num_out: int,
  row_bytes: int,
  weight_bytes: int,
  device_kind: str,
) -> Tiles:
  """Every pass's tile for x_MD, w_GDF and the bytes of one of their numbers."""
  chip = CHIPS.get(device_kind, _FALLBACK)
  rows = num_rows, num_groups
  fwd = _fastest(_Problem(*rows, num_in, num_out, row_bytes, 0), chip)
  m, f, d = _fastest(_Problem(*rows, num_out, num_in, row_bytes, 0), chip)
  drhs = _fastest(_Problem(*rows, num_in, num_out, row_bytes, weight_bytes), chip)
  return Tiles(fwd, (m, d, f), drhs)


@functools.cache
def _fastest(problem: _Problem, chip: Chip) -> Tile:
  rows = [m for m in _ROW_TILES if m <= problem.num_rows] or [_round_up(problem.num_rows, 16)]
  # Rows that no tile divides have to be copied to be padded.
  rows = [m for m in rows if problem.num_rows % m == 0] or rows
  tiles = itertools.product(rows, _widths(problem.k), _widths(problem.n))
  limit = _VMEM_MARGIN * chip.vmem_mib * 2**20
  fitting = [t for t in tiles if _vmem_bytes(problem, t) <= limit]
  return min(fitting, key=lambda tile: _seconds(problem, tile, chip))


def _widths(dim: int) -> list[int]:
  """The least tile for each number of tiles that an axis can be cut into; first the whole axis."""
  cuts = range(1, _ceil_div(dim, _LANES) + 1)
  return sorted({min(dim, _round_up(_ceil_div(dim, cut), _LANES)) for cut in cuts}, reverse=True)


def _vmem_bytes(problem: _Problem, tile: Tile) -> int:
  """What a kernel needs: two buffers per operand and result, the sum, and what it spills."""
  m, k, n = tile
  if problem.sum_bytes:
    spilled = 4 * m * k  # masked rows, transposed in float32
    return 2 * problem.row_bytes * (m * k + m * n) + (2 * problem.sum_bytes + 4) * k * n + spilled
  spilled = 4 * m * n  # the product, before it is added
  return 2 * problem.row_bytes * (m * k + k * n + m * n) + 4 * m * n + spilled


def _seconds(problem: _Problem, tile: Tile, chip: Chip) -> float:
  """Estimate: the slower of arithmetic and memory, an idle core, and the grid's steps."""
  m, k, n = tile
  visits = _ceil_div(problem.num_rows, m) + problem.num_groups - 1
  cuts_k, cuts_n = _ceil_div(problem.k, k), _ceil_div(problem.n, n)
  steps = visits * cuts_k * cuts_n
  if problem.sum_bytes:
    moved = problem.row_bytes * steps * (m * k + m * n)
    moved += problem.sum_bytes * problem.num_groups * problem.k * problem.n
  else:
    # A whole K stays in VMEM for all tiles of its group.
    fetches = steps if cuts_k > 1 else problem.num_groups * cuts_n
    moved = problem.row_bytes * (steps * m * k + fetches * k * n + visits * cuts_n * m * n)
  arithmetic = 2 * steps * m * k * n / (chip.peak_tflops * 1e12)
  idle = _ceil_div(cuts_n, chip.num_cores) * chip.num_cores / cuts_n
  busy = max(arithmetic, moved / (chip.hbm_gbps * 1e9))
  return idle * (busy + steps * _STEP_SECONDS / chip.num_cores)


def _ceil_div(a: int, b: int) -> int:
  return -(-a // b)


def _round_up(a: int, b: int) -> int:
  return _ceil_div(a, b) * b
