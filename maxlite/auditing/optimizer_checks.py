"""The formulas of the optimizers in numpy, for one update from moments that are not zero."""

import re
from collections.abc import Generator, Iterator, Mapping

import numpy as np

from maxlite.auditing.compare import true_norm
from maxlite.auditing.measure import Arrays, StepResults
from maxlite.config.schema import ModelConfig, OptimizerConfig
from maxlite.optim.labels import STACKED
from maxlite.training.routed_bias import BIAS
from maxlite.training.spec import StepSpec

UPDATE_TOLERANCE = 1e-6  # relative to the largest update of the parameter
# Optimizers of which this file has the formula.
CHECKED = ("adamw", "lion", "muon")
# Muon's polynomial: Jordan et al., Muon (2024).
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_HEADS = ("q_heads", "kv_heads")
_CLIPPED = r"(^|/)attention/(query|key|kv_up)/"


def check_update(
  name: str,
  cfg: OptimizerConfig,
  spec: StepSpec,
  results: StepResults,
  before: Arrays,
  after: Arrays,
  axes: Mapping[str, tuple[str | None, ...]],
) -> Iterator[str]:
  """Lines on what of an update by one of CHECKED is not as its formula says.

  Args:
    name: of the objective.
    before, after: the states, by path.
    axes: by trained parameter, its logical axes.
  """
  norm = float(true_norm(results))
  clip = 1.0
  if 0 < cfg.gradient_clipping_threshold < norm:
    clip = cfg.gradient_clipping_threshold / norm
  rate = float(results.metrics["learning_rate"])
  for path in sorted(axes):
    if re.search(BIAS, path):
      continue
    gradient = clip * np.asarray(results.gradients[path], np.float64)
    moments = [_moment(after, key, path) for key in ("mu", "nu")]
    direction = None
    if cfg.opt_type in ("adamw", "muon") and all(moments):
      direction = yield from _adam(name, cfg, path, gradient, before, after)
    elif cfg.opt_type == "lion" and moments[0]:
      direction = yield from _lion(name, cfg, path, gradient, before, after)
    elif cfg.opt_type == "muon" and moments[0]:
      mean = yield from _momentum(name, cfg, path, gradient, before, after)
      direction = _orthogonalised(mean, path, axes[path], cfg.muon_split, spec.model)
    # QK-clip changes these after the update.
    is_clipped = spec.training.qk_clip_threshold and re.search(_CLIPPED, path)
    if direction is not None and not is_clipped:
      param = np.asarray(before[f"params/{path}"], np.float64)
      is_of_muon = cfg.opt_type == "muon" and not moments[1]
      direction = _mup_factor(path, axes[path], spec.model, is_of_muon=is_of_muon) * direction
      is_matrix = _is_matrix(path, axes[path])
      decay = cfg.adam_weight_decay if is_matrix else 0.0
      update = -rate * (direction + decay * param)
      reason = "another learning rate, clipping, weight decay or scale than the config's?"
      yield from _compare(name, f"the update of {path}", results.update[path], update, reason)
    if spec.training.ema_decay:
      yield from _average(name, spec.training.ema_decay, path, before, after)


def _moment(state: Arrays, key: str, path: str) -> str:
  """The path of a moment of a parameter in the state of the optimizer; empty: it has none."""
  ends = f"/{key}/{path}"
  return next((each for each in state if each.endswith(ends)), "")


def _adam(
  name: str, cfg: OptimizerConfig, path: str, gradient: np.ndarray, before: Arrays, after: Arrays
) -> Generator[str, None, np.ndarray]:
  """Source: Kingma and Ba, Adam (2015), algorithm 1."""
  moments = []
  for key, decay, power in (("mu", cfg.adam_b1, 1), ("nu", cfg.adam_b2, 2)):
    place = _moment(after, key, path)
    expected = decay * before[place] + (1 - decay) * gradient**power
    reason = "a moment that is not decayed, or an update taken twice or not at all?"
    yield from _compare(name, f"Adam's {key} of {path}", after[place], expected, reason)
    moments.append(expected)
  count_path = place[: place.rindex("/nu/")] + "/count"
  count = int(before[count_path]) + 1
  if int(after[count_path]) != count:
    yield f"{name}: Adam has counted {after[count_path]} updates after {count}"
  mean = moments[0] / (1 - cfg.adam_b1**count)
  square = moments[1] / (1 - cfg.adam_b2**count)
  return mean / (np.sqrt(square) + cfg.adam_eps)


def _lion(
  name: str, cfg: OptimizerConfig, path: str, gradient: np.ndarray, before: Arrays, after: Arrays
) -> Generator[str, None, np.ndarray]:
  """Source: Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2."""
  place = _moment(after, "mu", path)
  expected = cfg.adam_b2 * before[place] + (1 - cfg.adam_b2) * gradient
  reason = "a moment that is not decayed, or an update taken twice or not at all?"
  yield from _compare(name, f"Lion's moment of {path}", after[place], expected, reason)
  return np.sign(cfg.adam_b1 * before[place] + (1 - cfg.adam_b1) * gradient)


def _momentum(
  name: str, cfg: OptimizerConfig, path: str, gradient: np.ndarray, before: Arrays, after: Arrays
) -> Generator[str, None, np.ndarray]:
  """Nesterov's momentum, with the corrections of its bias that Optax makes."""
  place = _moment(after, "mu", path)
  beta = cfg.muon_beta
  momentum = beta * before[place] + (1 - beta) * gradient
  reason = "a moment that is not decayed, or an update taken twice or not at all?"
  yield from _compare(name, f"Muon's momentum of {path}", after[place], momentum, reason)
  count_path = place[: place.rindex("/mu/")] + "/count"
  count = int(before[count_path]) + 1
  if int(after[count_path]) != count:
    yield f"{name}: Muon has counted {after[count_path]} updates after {count}"
  next_share = beta * momentum / (1 - beta ** (count + 1))
  return next_share + (1 - beta) * gradient / (1 - beta**count)


def _orthogonalised(
  x: np.ndarray, path: str, axes: tuple[str | None, ...], split: str, model: ModelConfig
) -> np.ndarray:
  """Muon's direction for a kernel, by the singular value decomposition of each of its matrices.

  Source: Jordan et al., Muon (2024); the size is that of Liu et al., Muon is Scalable for LLM
  Training (2025), section 2.2.
  """
  mla = model.mla
  parts = {
    "kv_up/kernel": [mla.qk_nope_head_dim],
    "kv_down/kernel": [mla.kv_lora_rank],
  }
  cuts = parts.get("/".join(path.rsplit("/", 2)[-2:]), [])
  if split == "none":
    cuts = []
  is_projection = re.search(r"(^|/)(query|key|value|kv_up)/kernel$", path) is not None
  has_matrix_per_head = split == "heads" and is_projection
  axes = ("layers",) * (
    x.ndim - len(axes)
  ) + axes  # of layers that are not scanned, but stacked here
  directions = []
  for part in np.split(x, cuts, axis=-1):
    separate = [
      n
      for n, axis in enumerate(axes)
      if axis in STACKED or (has_matrix_per_head and axis in _HEADS)
    ]
    sides = [n for n in range(part.ndim) if n not in separate]
    moved = part.transpose(*separate, *sides)
    stacked = moved.shape[: len(separate)]
    num_inputs = len(sides) - 1 if axes[sides[-1]] == "embed" else 1
    num_in = int(np.prod(moved.shape[len(separate) :][:num_inputs]))
    matrices = moved.reshape(*stacked, num_in, -1)
    u, s, v = np.linalg.svd(matrices, full_matrices=False)
    s = s / (np.sqrt(np.sum(s**2, axis=-1, keepdims=True)) + 1e-8)
    linear, cubic, quintic = _NEWTON_SCHULZ
    for _ in range(5):
      s = linear * s + cubic * s**3 + quintic * s**5
    size = 0.2 * np.sqrt(max(matrices.shape[-2:]))
    direction = (size * (u * s[..., None, :]) @ v).reshape(moved.shape)
    directions.append(direction.transpose(*np.argsort([*separate, *sides])))
  return np.concatenate(directions, axis=-1)


def _is_matrix(path: str, axes: tuple[str | None, ...]) -> bool:
  """Whether it is no norm, bias or other number per channel or head: these do not decay."""
  is_matrix = sum(axis not in STACKED for axis in axes) > 1
  return is_matrix and not path.endswith(("bias", "scale"))


def _mup_factor(
  path: str, axes: tuple[str | None, ...], model: ModelConfig, *, is_of_muon: bool
) -> float:
  """muP's factor of an update: 1 / m for what has a growing number of inputs.

  For Muon, whose updates of hidden kernels grow by sqrt(m) less, it is 1 / sqrt(m) there.

  Source: Yang et al., Tensor Programs V (2022), table 3.
  """
  if model.scaling.parametrization != "mup":
    return 1.0
  m = model.base_emb_dim / model.scaling.mup_base_emb_dim
  factor = 1.0
  if _is_matrix(path, axes) and axes[0] != "vocab":
    factor = 1 / m
  if is_of_muon and "router" not in axes:
    factor = m**-0.5
  if model.logits_via_embedding and path.endswith("final_norm/scale"):
    factor /= m
  queries = "query_norm/scale" if model.family.attention.qk_norm else "query/(kernel|bias)"
  if re.search(rf"/attention/{queries}$", path):
    base_head_dim = model.scaling.mup_base_head_dim or model.head_dim
    factor *= (base_head_dim / model.head_dim) ** 0.5
  return factor


def _average(name: str, decay: float, path: str, before: Arrays, after: Arrays) -> Iterator[str]:
  old, new = before[f"ema/{path}"], after[f"ema/{path}"]
  expected = decay * old + (1 - decay) * np.asarray(after[f"params/{path}"], old.dtype)
  reason = "another decay, or the parameters before the update?"
  yield from _compare(name, f"the average of {path}", new - old, expected - old, reason)


def _compare(name: str, what: str, got: np.ndarray, want: np.ndarray, reason: str) -> Iterator[str]:
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  difference = np.abs(got - want).max(initial=0)
  scale = np.abs(want).max(initial=0)
  if difference <= UPDATE_TOLERANCE * scale + 1e-13:
    return
  index = np.unravel_index(int(np.argmax(np.abs(got - want))), want.shape)
  place = [int(i) for i in index]
  yield f"{name}: {what} at {place} is {got[index]:.8g} instead of {want[index]:.8g}: {reason}"
