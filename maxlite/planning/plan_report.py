"""Formatting of a plan as lines of text."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from maxlite.phases.phase_plan import PhaseSpan
from maxlite.planning.hlo_collectives import Collective
from maxlite.planning.hlo_cost import MatmulFlops
from maxlite.planning.hlo_traffic import Traffic, largest_traffic
from maxlite.planning.memory_estimate import MemoryEstimate
from maxlite.planning.roofline import Bound
from maxlite.training.features.local_updates import AXIS

GB = 1e9
# Characters of a timeline: a step in which a phase trains, and one in which it does not.
BAR = "█"
NO_BAR = "·"
_TIMELINE_WIDTH = 60
_LARGEST_LINES = 16  # lines of code in the table of traffic
# Rows of the table of memory; those with an indent are parts of the temporaries.
_MEMORY_ROWS = (
  "parameters",
  "optimizer state",
  "teacher",
  "batch, padding",
  "temporaries",
  "  saved activations",
  "  gradients",
  "  activations of a layer",
  "  gradients of activations",
  "  gathered weights",
  "  unembedding",
  "  logits",
  "gaps in temporaries",
  "program",
  "total",
  "peak",
  "host: optimizer state",
  "host: saved activations",
)


class CompiledMemory(Protocol):
  """Bytes of a compiled program on one device, by `jax.stages.Compiled.memory_analysis`."""

  argument_size_in_bytes: int
  output_size_in_bytes: int
  alias_size_in_bytes: int
  temp_size_in_bytes: int
  generated_code_size_in_bytes: int
  peak_memory_in_bytes: int
  host_argument_size_in_bytes: int
  host_temp_size_in_bytes: int


def memory_lines(estimate: MemoryEstimate, stats: CompiledMemory | None) -> list[str]:
  """Memory of a device: the estimate and, if given, the compiled program's."""
  estimated = _estimated_memory(estimate)
  compiled: dict[str, float] = {}
  header = f"{'GB per device':<26}{'estimate':>10}"
  if stats:
    compiled = _compiled_memory(estimate, stats)
    header = f"{header}{'compiled':>10}"
  lines = [header]
  for name in _MEMORY_ROWS:
    if name in estimated or name in compiled:
      line = f"{name:<26}{_gigabytes(estimated, name):>10}{_gigabytes(compiled, name):>10}"
      lines.append(line.rstrip())
  if estimate.host_optimizer or estimate.host_activations:
    lines.append("  not part of the bounds below: transfers between host and device")
  return lines


def _gigabytes(sizes: dict[str, float], name: str) -> str:
  """The cell of row `name`; empty if the column does not have the row."""
  if name not in sizes:
    return ""
  return f"{sizes[name] / GB:.3f}"


def _estimated_memory(estimate: MemoryEstimate) -> dict[str, float]:
  """Bytes by row of `memory_lines`."""
  estimated = _state_memory(estimate)
  estimated["temporaries"] = estimate.temporaries
  estimated["  saved activations"] = estimate.saved_activations
  estimated["  gradients"] = estimate.gradients
  estimated["  activations of a layer"] = estimate.layer_activations
  estimated["  gradients of activations"] = estimate.layer_gradients
  estimated["  gathered weights"] = estimate.gathered_weights
  estimated["  unembedding"] = estimate.unembedding
  estimated["  logits"] = estimate.logits
  estimated["peak"] = estimate.total
  if estimate.host_optimizer:
    estimated["host: optimizer state"] = estimate.host_optimizer
  if estimate.host_activations:
    estimated["host: saved activations"] = estimate.host_activations
  return estimated


def _state_memory(estimate: MemoryEstimate) -> dict[str, float]:
  """Bytes of the arguments of a step, except its batch."""
  state = {
    "parameters": estimate.parameters,
    "optimizer state": estimate.optimizer,
  }
  if estimate.teacher:
    state["teacher"] = estimate.teacher
  return state


def _compiled_memory(estimate: MemoryEstimate, stats: CompiledMemory) -> dict[str, float]:
  """Bytes by row of `memory_lines`, of a program whose arguments are the estimate's state."""
  compiled = _state_memory(estimate)
  state_bytes = sum(compiled.values())
  batch_bytes = stats.argument_size_in_bytes - state_bytes
  program_bytes = stats.generated_code_size_in_bytes
  temporaries = stats.temp_size_in_bytes
  others = batch_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
  compiled["batch, padding"] = others
  compiled["program"] = program_bytes
  compiled["total"] = state_bytes + (others + program_bytes) + temporaries
  compiled["temporaries"] = temporaries
  peak = stats.peak_memory_in_bytes
  if peak > 1.01 * stats.argument_size_in_bytes:  # XLA:CPU omits the temporaries in its peak
    # Where there is room, XLA:TPU leaves gaps: not all of the space is in use at any time.
    live = min(peak - stats.argument_size_in_bytes, temporaries)
    compiled["temporaries"] = live
    compiled["gaps in temporaries"] = temporaries - live
    compiled["peak"] = peak
  if stats.host_argument_size_in_bytes:
    compiled["host: optimizer state"] = stats.host_argument_size_in_bytes
  if stats.host_temp_size_in_bytes:
    compiled["host: saved activations"] = stats.host_temp_size_in_bytes
  return compiled


def matmul_lines(flops: MatmulFlops, model_flops: float, unknown_loops: int) -> list[str]:
  """FLOPs of one device against the model's, which exclude rematerialization and padding."""
  compiled_tera = flops.total / 1e12
  model_tera = model_flops / 1e12
  ratio = flops.total / model_flops
  compiled = f"matmuls: {compiled_tera:.3f} TFLOP per step and device"
  lines = [f"{compiled}, {ratio:.2f} x the {model_tera:.3f} of the model"]
  if flops.kernels_unknown:
    lines.append(f"  not counted: {flops.kernels_unknown} kernels that do not report their FLOPs")
  if unknown_loops:
    lines.append(f"  counted as one iteration: {unknown_loops} loops of data-dependent length")
  return lines


def comm_lines(estimated: Sequence[Collective], found: Sequence[Collective] | None) -> list[str]:
  """GB sent per device and step by mesh axes: the estimate and, if given, the compiled program."""
  header = f"{'GB sent per device':<26}{'estimate':>10}"
  columns = [sent_by_axes(estimated)]
  if found is not None:
    header = f"{header}{'compiled':>10}"
    columns.append(sent_by_axes(found))
  names: set[str] = set()
  for column in columns:
    names.update(column)
  if not names:
    return []
  lines = [header]
  last_column = columns[-1]
  for name in sorted(names, key=lambda name: (-last_column.get(name, 0.0), name)):
    line = f"{name:<26}"
    for column in columns:
      gigabytes = column.get(name, 0.0) / GB
      line += f"{gigabytes:>10.3f}"
    lines.append(line)
  return lines


def sent_by_axes(collectives: Sequence[Collective]) -> dict[str, float]:
  """Bytes that a device sends along each combination of mesh axes."""
  sent: dict[str, float] = defaultdict(float)
  for collective in collectives:
    sent[_axes_of(collective)] += collective.sent_bytes
  return dict(sent)


def _axes_of(collective: Collective) -> str:
  axes = " x ".join(collective.mesh_axes)
  if collective.between_slices:
    axes += " (network)"
  return axes


def collective_lines(found: Sequence[Collective], is_compiled: bool) -> list[str]:
  """A table of the collectives of one device and step."""
  header = f"{'collective':<20}{'mesh axes':<24}{'per step':>9}"
  if is_compiled:
    header += "   async"
  lines = [f"{header}{'GB':>10}{'GB sent':>10}"]
  for collective in found:
    line = f"{collective.kind:<20}{_axes_of(collective):<24}{collective.times:>9,.6g}"
    if is_compiled:
      line += f"{collective.async_times:>8.0f}"
    payload = collective.payload_bytes / GB
    sent = collective.sent_bytes / GB
    lines.append(f"{line}{payload:>10.3f}{sent:>10.3f}")
  return lines


def outer_lines(found: Sequence[Collective], period: int) -> list[str]:
  """The bytes that replicas exchange, against exchanging gradients at every step."""
  sent_bytes = 0.0
  combinations: set[str] = set()
  for collective in found:
    if AXIS in collective.mesh_axes:
      sent_bytes += collective.sent_bytes
      combinations.add(_axes_of(collective))
  sent = sent_bytes / GB
  whole = f"{sent * period:.6f} GB"
  axes = ", ".join(sorted(combinations)) or AXIS
  return [
    f"outer steps send {whole} per device over {axes} every {period} steps,",
    f"  {sent:.6f} GB per step; gradients at every step would send {whole}",
  ]


def traffic_lines(traffic: Sequence[Traffic]) -> list[str]:
  """Where the HBM bytes of a step go: by category, and the lines of code that move most."""
  total = sum(part.num_bytes for part in traffic)
  by_category = largest_traffic(traffic, lambda part: part.category)
  by_line = largest_traffic(traffic, _category_and_line)
  lines = [f"{'GB of HBM':>10}{'share':>8}"]
  for name, num_bytes in by_category:
    lines.append(_traffic_row(name, num_bytes, total))
  lines.append("")
  for name, num_bytes in by_line[:_LARGEST_LINES]:
    lines.append(_traffic_row(name, num_bytes, total))
  return lines


def _category_and_line(part: Traffic) -> str:
  line = part.source or "unknown line"
  return f"{part.category:<22}{line}"


def _traffic_row(name: str, num_bytes: float, total: float) -> str:
  share = num_bytes / total
  return f"{num_bytes / GB:>10.3f}{share:>8.1%}  {name}"


def compare_traffic(once: float, by_xla: float) -> str:
  """HBM bytes against XLA's cost analysis, which counts the bodies of loops once."""
  counts = f"{once / GB:.3f} GB, by XLA's cost analysis {by_xla / GB:.3f} GB"
  difference = once / by_xla - 1
  return f"  with loops counted once: {counts} ({difference:+.1%})"


def roofline_lines(
  bounds: Sequence[Bound], useful_share: float | None, exposed_seconds: float, is_complete: bool
) -> list[str]:
  """Lower bounds of the step time.

  Args:
    bounds: the use of each resource.
    useful_share: the model's share of the compiled FLOPs; None if nothing was compiled, so that
      HBM traffic and rematerialization are unknown.
    exposed_seconds: time of sends that nothing overlaps.
    is_complete: whether the costs of all kernels are known.
  """
  lines = ["lower bounds of the step time, with perfect overlap at published peak rates:"]
  for bound in bounds:
    lines.append(_bound_line(bound))
  bottleneck = max(bounds, key=lambda bound: bound.seconds)
  label = f"  bottleneck: {bottleneck.resource}"
  if useful_share is None:
    lines.append(f"{label}; HBM and rematerialization are not counted")
    return lines
  if not is_complete:
    lines.append(f"{label}, without the kernels that do not report their costs")
    return lines
  matmuls = next(bound for bound in bounds if bound.resource == "matmuls")
  useful_seconds = useful_share * matmuls.seconds
  mfu = useful_seconds / bottleneck.seconds
  lines.append(f"{label}; MFU is at most {mfu:.1%}")
  if exposed_seconds:
    exposed_mfu = useful_seconds / (bottleneck.seconds + exposed_seconds)
    exposed = f"{exposed_seconds * 1e3:.2f} ms of sends by synchronous collectives"
    lines.append(f"  exposed: {exposed}; with them, MFU is at most {exposed_mfu:.1%}")
  return lines


def _bound_line(bound: Bound) -> str:
  unit = "TB"
  if bound.resource == "matmuls":
    unit = "TFLOP"
  milliseconds = bound.seconds * 1e3
  amount = bound.amount / 1e12
  rate = bound.rate / 1e12
  return (
    f"  {bound.resource:<10}{milliseconds:>10.2f} ms   {amount:.3f} {unit} at {rate:g} {unit}/s"
  )


def timeline_lines(spans: Sequence[PhaseSpan]) -> list[str]:
  """Render a row of bars per phase, in order of first occurrence, under a ruler of steps."""
  _, num_steps, _ = spans[-1]
  width = min(_TIMELINE_WIDTH, num_steps)
  bars_of: dict[str, list[str]] = {}
  for first, last, phase in spans:
    bars = bars_of.setdefault(phase, [NO_BAR] * width)
    first_column = (first - 1) * width // num_steps
    last_column = (last - 1) * width // num_steps
    for column in range(first_column, last_column + 1):
      bars[column] = BAR
  indent = max(len(phase) for phase in bars_of) + 2
  ruler = "1" + str(num_steps).rjust(width - 1)
  lines = [" " * indent + ruler]
  for phase, bars in bars_of.items():
    lines.append(phase.ljust(indent) + "".join(bars))
  return lines
