"""Formatting of a plan as lines of text."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from maxlite.phases.phase_plan import PhaseSpan
from maxlite.planning.hlo_collectives import Collective
from maxlite.planning.hlo_cost import MatmulFlops
from maxlite.planning.hlo_traffic import Traffic, largest_traffic
from maxlite.planning.memory_estimate import MemoryEstimate
from maxlite.planning.roofline import Bound
from maxlite.training.transforms.local_updates import AXIS

GB = 1e9
BAR, NO_BAR = "█", "·"  # of a timeline
_GAPS = "gaps in temporaries"
_LARGEST_LINES, _TIMELINE_WIDTH = 16, 60


def memory_lines(estimate: MemoryEstimate, stats: Any | None) -> list[str]:
  """Memory of a device: the estimate and, if given, the compiler's `CompiledMemoryStats`."""
  state = {"parameters": estimate.parameters, "optimizer state": estimate.optimizer}
  state |= {"teacher": estimate.teacher} if estimate.teacher else {}
  parts = {
    "  saved activations": estimate.saved_activations,
    "  gradients": estimate.gradients,
    "  activations of a layer": estimate.layer_activations,
    "  gradients of activations": estimate.layer_gradients,
    "  gathered weights": estimate.gathered_weights,
    "  unembedding": estimate.unembedding,
    "  logits": estimate.logits,
  }
  estimated = state | {"temporaries": estimate.temporaries} | parts | {"peak": estimate.total}
  host = {
    "host: optimizer state": estimate.host_optimizer,
    "host: saved activations": estimate.host_activations,
  }
  estimated |= {name: size for name, size in host.items() if size}
  compiled = _compiled_memory(stats, state) if stats else {}
  if stats:
    sizes = stats.host_argument_size_in_bytes, stats.host_temp_size_in_bytes
    compiled |= {name: size for name, size in zip(host, sizes, strict=True) if size}
  names = [
    *state,
    "batch, padding",
    "temporaries",
    *parts,
    _GAPS,
    "program",
    "total",
    "peak",
    *host,
  ]
  lines = [f"{'GB per device':<26}{'estimate':>10}{'compiled' if stats else '':>10}".rstrip()]
  for name in names:
    if name in estimated or name in compiled:
      cells = [f"{t[name] / GB:.3f}" if name in t else "" for t in (estimated, compiled)]
      lines.append(f"{name:<26}{cells[0]:>10}{cells[1]:>10}".rstrip())
  if any(host.values()):
    lines.append("  not part of the bounds below: transfers between host and device")
  return lines


def _compiled_memory(stats: Any, state: Mapping[str, float]) -> dict[str, float]:
  """Bytes by row of `memory_lines`, of a program with this `state` among its arguments."""
  rest = stats.argument_size_in_bytes - sum(state.values())
  temporaries = stats.temp_size_in_bytes
  others = {
    "batch, padding": rest + stats.output_size_in_bytes - stats.alias_size_in_bytes,
    "program": stats.generated_code_size_in_bytes,
  }
  compiled = {**state, **others, "total": sum(state.values()) + sum(others.values()) + temporaries}
  peak = stats.peak_memory_in_bytes
  if peak <= 1.01 * stats.argument_size_in_bytes:  # XLA:CPU omits it
    return compiled | {"temporaries": temporaries}
  # Where there is room, XLA:TPU leaves gaps: not all of the space is in use at any time.
  live = min(peak - stats.argument_size_in_bytes, temporaries)
  return compiled | {"temporaries": live, _GAPS: temporaries - live, "peak": peak}


def matmul_lines(flops: MatmulFlops, model_flops: float, unknown_loops: int) -> list[str]:
  """FLOPs of one device against the model's, which exclude rematerialization and padding."""
  compiled = f"matmuls: {flops.total / 1e12:.3f} TFLOP per step and device"
  ratio = flops.total / model_flops
  lines = [f"{compiled}, {ratio:.2f} x the {model_flops / 1e12:.3f} of the model"]
  if flops.kernels_unknown:
    lines.append(f"  not counted: {flops.kernels_unknown} kernels that do not report their FLOPs")
  if unknown_loops:
    lines.append(f"  counted as one iteration: {unknown_loops} loops of data-dependent length")
  return lines


def comm_lines(estimated: Sequence[Collective], found: Sequence[Collective] | None) -> list[str]:
  """GB sent per device and step by mesh axes: the estimate and, if given, the compiled program."""
  tables = [sent_by_axes(estimated)] + ([] if found is None else [sent_by_axes(found)])
  names = sorted({*tables[0], *tables[-1]}, key=lambda name: -tables[-1].get(name, 0.0))
  titles = ("estimate", "compiled")[: len(tables)]
  lines = [f"{'GB sent per device':<26}" + "".join(f"{title:>10}" for title in titles)]
  cells = lambda name: "".join(f"{table.get(name, 0.0) / GB:>10.3f}" for table in tables)
  return [*lines, *(f"{name:<26}{cells(name)}" for name in names)] if names else []


def sent_by_axes(collectives: Sequence[Collective]) -> dict[str, float]:
  """Bytes that a device sends along each combination of mesh axes."""
  sent: dict[str, float] = defaultdict(float)
  for c in collectives:
    sent[_axes_of(c)] += c.sent_bytes
  return dict(sent)


def _axes_of(collective: Collective) -> str:
  return " x ".join(collective.mesh_axes) + (" (network)" if collective.between_slices else "")


def collective_lines(found: Sequence[Collective], is_compiled: bool) -> list[str]:
  """A table of the collectives of one device and step."""
  titles = f"{'collective':<20}{'mesh axes':<24}{'per step':>9}"
  lines = [f"{titles}{'   async' if is_compiled else ''}{'GB':>10}{'GB sent':>10}"]
  for c in found:
    name = f"{c.kind:<20}{_axes_of(c):<24}{c.times:>9,.6g}"
    name += f"{c.async_times:>8.0f}" if is_compiled else ""
    lines.append(f"{name}{c.payload_bytes / GB:>10.3f}{c.sent_bytes / GB:>10.3f}")
  return lines


def outer_lines(found: Sequence[Collective], period: int) -> list[str]:
  """The bytes that replicas exchange, against exchanging gradients at every step."""
  among = [c for c in found if AXIS in c.mesh_axes]
  sent, over = sum(c.sent_bytes for c in among) / GB, {_axes_of(c) for c in among}
  whole, axes = f"{sent * period:.6f} GB", ", ".join(sorted(over)) or AXIS
  return [
    f"outer steps send {whole} per device over {axes} every {period} steps,",
    f"  {sent:.6f} GB per step; gradients at every step would send {whole}",
  ]


def traffic_lines(traffic: Sequence[Traffic]) -> list[str]:
  """Where the HBM bytes of a step go: by category, and the lines of code that move most."""
  total = sum(part.num_bytes for part in traffic)
  by_category = largest_traffic(traffic, lambda part: part.category)
  by_line = largest_traffic(
    traffic, lambda part: f"{part.category:<22}{part.source or 'unknown line'}"
  )
  row = lambda name, size: f"{size / GB:>10.3f}{size / total:>8.1%}  {name}"
  lines = [f"{'GB of HBM':>10}{'share':>8}", *(row(*named) for named in by_category), ""]
  return [*lines, *(row(*named) for named in by_line[:_LARGEST_LINES])]


def compare_traffic(once: float, by_xla: float) -> str:
  """HBM bytes against those of XLA's cost analysis, which counts the bodies of loops once."""
  counts = f"{once / GB:.3f} GB, by XLA's cost analysis {by_xla / GB:.3f} GB"
  return f"  with loops counted once: {counts} ({once / by_xla - 1:+.1%})"


def roofline_lines(
  bounds: Sequence[Bound], useful_share: float | None, exposed_seconds: float, is_complete: bool
) -> list[str]:
  """Lower bounds of the step time.

  Args:
    useful_share: the model's share of the compiled FLOPs; None if nothing was compiled, so that
      HBM traffic and rematerialization are unknown.
    exposed_seconds: of sends that nothing overlaps.
    is_complete: whether the costs of all kernels are known.
  """
  lines = ["lower bounds of the step time, with perfect overlap at published peak rates:"]
  for bound in bounds:
    unit = "TFLOP" if bound.resource == "matmuls" else "TB"
    amount = f"{bound.amount / 1e12:.3f} {unit} at {bound.rate / 1e12:g} {unit}/s"
    lines.append(f"  {bound.resource:<10}{bound.seconds * 1e3:>10.2f} ms   {amount}")
  bottleneck = max(bounds, key=lambda bound: bound.seconds)
  label = f"  bottleneck: {bottleneck.resource}"
  if useful_share is None:
    return [*lines, f"{label}; HBM and rematerialization are not counted"]
  if not is_complete:
    return [*lines, f"{label}, without the kernels that do not report their costs"]
  matmuls = next(bound for bound in bounds if bound.resource == "matmuls")
  useful = useful_share * matmuls.seconds
  lines.append(f"{label}; MFU is at most {useful / bottleneck.seconds:.1%}")
  if exposed_seconds:
    mfu = useful / (bottleneck.seconds + exposed_seconds)
    exposed = f"{exposed_seconds * 1e3:.2f} ms of sends by synchronous collectives"
    lines.append(f"  exposed: {exposed}; with them, MFU is at most {mfu:.1%}")
  return lines


def timeline_lines(spans: Sequence[PhaseSpan]) -> list[str]:
  """Render a row of bars per phase, in order of first occurrence, under a ruler of steps."""
  num_steps = spans[-1][1]
  width = min(_TIMELINE_WIDTH, num_steps)
  names = list(dict.fromkeys(name for _, _, name in spans))
  indent = max(map(len, names)) + 2
  lines = [" " * indent + "1" + str(num_steps).rjust(width - 1)]
  for name in names:
    bars = [NO_BAR] * width
    for first, last, phase in spans:
      columns = range((first - 1) * width // num_steps, (last - 1) * width // num_steps + 1)
      for column in columns if phase == name else ():
        bars[column] = BAR
    lines.append(name.ljust(indent) + "".join(bars))
  return lines
