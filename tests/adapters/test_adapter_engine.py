"""The bits of an adapter do not depend on the adapters that share its engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from support.slow_cases import fast_only
from support.tiny_adapters import MIXTURE, bits_of, datum_of, engine_of, model_of

from maxlite.adapters.datum import Datum
from maxlite.adapters.engine import AdamW, AdapterEngine, AdapterSpec
from maxlite.adapters.losses import LOSSES
from maxlite.errors import UserError

pytestmark = pytest.mark.usefixtures("fast_programs")
SPECS = (AdapterSpec(rank=1, seed=1), AdapterSpec(rank=4, seed=2), AdapterSpec(rank=3, seed=3))
STEP = AdamW(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=3.0, eps=1e-8)


@pytest.fixture(scope="module")
def engine():
  return engine_of()


def script_of(seed):
  """The requests of a client: data to train on, data to evaluate, and updates."""
  rng = np.random.default_rng(seed)
  losses = list(LOSSES)
  requests = []
  for n in range(8):
    kind = rng.choice(["train", "evaluate", "update"], p=[0.6, 0.1, 0.3])
    loss = losses[int(rng.integers(len(losses)))]
    data = [datum_of(100 * seed + 10 * n + i, loss) for i in range(int(rng.integers(1, 4)))]
    step = STEP._replace(learning_rate=float(rng.uniform(1e-3, 1e-1)))
    requests.append((kind, data, step))
  return [*requests, ("train", [datum_of(seed)], STEP), ("update", [], STEP)]


def run_alone(engine, spec, script):
  """(bits of all answers, bits of the final state) of a client without others."""
  engine.join(1, engine.new_adapter(spec))
  answers = []
  for kind, data, step in script:
    rows = [(1, datum) for datum in data]
    if kind == "train":
      answers += engine.forward_backward(rows)
    elif kind == "evaluate":
      answers += engine.forward(rows)
    else:
      answers.append(engine.update(1, step))
  return bits_of(answers), bits_of(engine.leave(1))


class Together:
  """Runs the scripts of several clients in random order, in random calls and in random slots."""

  def __init__(self, engine, specs, scripts, rng):
    self.engine, self.rng, self.names = engine, rng, range(len(specs))
    self.parked = {name: engine.new_adapter(specs[name]) for name in self.names}
    self.slots = {}
    self.answers = {name: [] for name in self.names}
    self.rest = {name: one_datum_at_a_time(scripts[name]) for name in self.names}

  def run(self):
    """As `run_alone`, of every client."""
    while any(self.rest.values()):
      self.move()
      self.train()
      self.answer_others()
    self.parked |= {name: self.engine.leave(slot) for name, slot in self.slots.items()}
    return [(bits_of(self.answers[name]), bits_of(self.parked[name])) for name in self.names]

  def move(self):
    """Some adapters leave their slots, and others take any free one."""
    for name in list(self.slots):
      if self.rng.random() < 0.2:
        self.parked[name] = self.engine.leave(self.slots.pop(name))
    free = sorted(set(range(self.engine.num_slots)) - set(self.slots.values()))
    for name in self.rng.permutation(list(self.parked)):
      if free:
        self.slots[name] = free.pop(int(self.rng.integers(len(free))))
        self.engine.join(self.slots[name], self.parked.pop(name))

  def train(self):
    """One call for some next data of all clients, in an order that keeps each client's."""
    owners = []
    for name in self.slots:
      due = next((i for i, each in enumerate(self.rest[name]) if each[0] != "train"), None)
      owners += [name] * int(self.rng.integers(1 + len(self.rest[name][:due])))
    owners = self.rng.permutation(owners).tolist()
    rows = [(self.slots[name], self.rest[name].pop(0)[1][0]) for name in owners]
    for name, result in zip(owners, self.engine.forward_backward(rows), strict=True):
      self.answers[name].append(result)

  def answer_others(self):
    for name in self.rng.permutation(list(self.slots)):
      if self.rest[name] and self.rest[name][0][0] != "train":
        kind, data, step = self.rest[name].pop(0)
        if kind == "evaluate":
          self.answers[name] += self.engine.forward([(self.slots[name], each) for each in data])
        else:
          self.answers[name].append(self.engine.update(self.slots[name], step))


def one_datum_at_a_time(script):
  requests = []
  for kind, data, step in script:
    pieces = [[datum] for datum in data] if kind == "train" else [data]
    requests += [(kind, piece, step) for piece in pieces]
  return requests


@pytest.mark.parametrize(
  "seed", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12)]]
)
def test_any_interleaving_of_clients_equals_each_alone_bit_for_bit(engine, seed):
  scripts = [script_of(seed * 3 + n) for n in range(3)]
  # One client's advantages are not numbers.
  bad = datum_of(7, "ppo")
  bad.inputs["advantages"][:] = np.nan
  scripts[2].insert(3, ("train", [bad], STEP))
  alone = [run_alone(engine, spec, script) for spec, script in zip(SPECS, scripts, strict=True)]
  assert Together(engine, SPECS, scripts, np.random.default_rng(seed)).run() == alone


@pytest.mark.slow
def test_an_interleaving_of_adapters_of_a_mixture_of_experts_equals_each_alone():
  engine = engine_of(2, **MIXTURE)
  scripts = [script_of(n) for n in range(3)]
  alone = [run_alone(engine, spec, script) for spec, script in zip(SPECS, scripts, strict=True)]
  assert Together(engine, SPECS, scripts, np.random.default_rng(5)).run() == alone
  factors = engine.new_adapter(SPECS[0]).factors
  assert any("moe" in path and "wi_0" in path for path in factors)


@pytest.mark.parametrize("loss", fast_only(LOSSES, "gspo"))
def test_losses_and_gradients_equal_those_of_the_formulas_on_the_merged_model(engine, loss):
  """The reference multiplies full matrices in numpy's way: x (W + s A B)."""
  spec = AdapterSpec(rank=2, seed=4)
  state = engine.new_adapter(spec)
  rng = np.random.default_rng(0)
  factors = {}
  for path, leaf in state.factors.items():
    mask = rank_mask(path, leaf.shape, spec.rank)
    factors[path] = np.float32(rng.normal(size=leaf.shape) / 4 * mask)
  state = state.replace(factors=factors)
  datum = datum_of(8, loss, length=9, **({"beta": 0.3} if loss == "dro" else {}))
  engine.join(0, state)
  (result,) = engine.forward_backward([(0, datum)])

  def merged_loss(factors):
    params = engine.merged(state.replace(factors=factors))
    logits = reference_logits(engine, params, datum.tokens)
    log_prob = jax.nn.log_softmax(logits)[np.arange(9), datum.targets]
    return reference_loss(datum, log_prob), log_prob

  (want, log_prob), gradient = jax.jit(jax.value_and_grad(merged_loss, has_aux=True))(factors)
  np.testing.assert_allclose(result.log_probs, log_prob, rtol=2e-5, atol=2e-5)
  np.testing.assert_allclose(result.loss, want, rtol=1e-4, atol=1e-4)
  got = engine.read(0).gradients
  for path, leaf in gradient.items():
    mask = rank_mask(path, leaf.shape, spec.rank)
    np.testing.assert_allclose(got[path] * mask, leaf * mask, rtol=2e-3, atol=2e-4, err_msg=path)
    assert not np.any(got[path] * (1 - mask)), f"{path}: beyond the rank"


def rank_mask(path, shape, rank):
  """1 within the rank, 0 beyond; the axis of ranks is the last of `lora_a`, else of known place."""
  axis = len(shape) - 1 if "lora_a" in path else int(path[0] == "layers")
  sides = [1] * len(shape)
  sides[axis] = shape[axis]
  return (np.arange(shape[axis]) < rank).astype(np.float32).reshape(sides)


def reference_logits(engine, params, tokens):
  from maxlite.models import Decoder

  model = Decoder(engine.base_cfg, engine._model.sharder)
  return jax.jit(model.apply)({"params": params}, tokens[None])[0]


def reference_loss(datum, lp):
  """The published formula of each loss, a sum over tokens."""
  inputs = datum.inputs
  if datum.loss == "cross_entropy":
    return -jnp.sum(inputs["weights"] * lp)
  q, advantage = inputs["logprobs"], inputs["advantages"]
  ratio = jnp.exp(lp - q)
  if datum.loss == "importance_sampling":
    return -jnp.sum(ratio * advantage)
  if datum.loss == "dro":
    return -jnp.sum(lp * advantage - 0.3 / 2 * (lp - q) ** 2)
  if datum.loss == "cispo":
    return -jnp.sum(jax.lax.stop_gradient(jnp.clip(ratio, 0.8, 1.2)) * lp * advantage)
  if datum.loss == "gspo":
    mask = inputs["sequence_ratio_mask"]
    mean = jax.lax.stop_gradient(jnp.sum(mask * (lp - q)) / jnp.maximum(jnp.sum(mask), 1))
    ratio = jnp.exp(mean + lp - jax.lax.stop_gradient(lp))
  return -jnp.sum(jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage))


def test_a_new_adapter_equals_the_base_and_stays_within_its_rank_and_parts(engine):
  datum = datum_of(1, length=12)
  plain = reference_logits(engine, engine.base_params, datum.tokens)
  want = jax.nn.log_softmax(plain)[np.arange(12), datum.targets]
  spec = AdapterSpec(rank=3, seed=2, train_mlp=False, train_unembed=False)
  engine.join(0, engine.new_adapter(spec))
  (result,) = engine.forward([(0, datum)])
  np.testing.assert_allclose(result.log_probs, want, rtol=1e-5, atol=1e-5)
  for _ in range(3):
    engine.forward_backward([(0, datum)])
    engine.update(0, STEP)
  changed = engine.leave(0)
  for path, leaf in changed.factors.items():
    mask = rank_mask(path, leaf.shape, 3)
    assert not np.any(leaf * (1 - mask)), path
    assert np.any(leaf) == ("attention" in path), path


@pytest.mark.slow
def test_updates_are_those_of_adamw(engine):
  torch = pytest.importorskip("torch")
  state = engine.new_adapter(AdapterSpec(rank=4, seed=5))
  engine.join(0, state)
  parameters = {
    path: torch.nn.Parameter(torch.tensor(leaf)) for path, leaf in state.factors.items()
  }
  step = AdamW(0.01, 0.8, 0.9, 1e-6, 0.2, 0.5)
  options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
  optimizer = torch.optim.AdamW(parameters.values(), **options)
  for n in range(3):
    engine.forward_backward([(0, datum_of(n))])
    for path, gradient in engine.read(0).gradients.items():
      parameters[path].grad = torch.tensor(gradient)
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
    optimizer.step()
    assert engine.update(0, step) == pytest.approx(float(norm), rel=1e-5)
  after = engine.leave(0)
  for path, leaf in after.factors.items():
    np.testing.assert_allclose(leaf, parameters[path].detach().numpy(), atol=2e-5, err_msg=path)
  assert after.count == 3


def test_a_gradient_that_is_not_finite_leaves_the_adapter_as_it_was(engine):
  state = engine.new_adapter(AdapterSpec(rank=2))
  engine.join(2, state)
  bad = datum_of(3)
  bad.inputs["weights"][0] = np.inf
  engine.forward_backward([(2, bad)])
  assert not np.isfinite(engine.update(2, STEP))
  assert bits_of(engine.leave(2)) == bits_of(state)


def test_evaluation_adds_no_gradient_and_a_slot_is_cleared_on_leaving(engine):
  engine.join(0, engine.new_adapter(SPECS[1]))
  engine.forward([(0, datum_of(1))])
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(engine.read(0).gradients))
  engine.forward_backward([(0, datum_of(1))])
  engine.update(0, STEP)
  engine.forward_backward([(0, datum_of(2))])
  engine.leave(0)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(engine.read(0)))


@pytest.mark.parametrize("kind", ["forward", "forward_backward"])
def test_a_row_does_not_depend_on_its_place_in_a_tile_or_on_rows_that_are_not_numbers(engine, kind):
  for slot, spec in enumerate(SPECS):
    engine.join(slot, engine.new_adapter(spec))
  datum = datum_of(1, length=20)
  bad = datum_of(2, length=20)
  bad.inputs["weights"][:] = np.inf
  call = getattr(engine, kind)
  alone = bits_of(call([(1, datum)]))
  for place in (1, 5, 8, 15):
    rows = [(2 * (n % 2), bad) for n in range(16)]
    rows[place] = (1, datum)
    assert bits_of(call(rows)[place]) == alone


def test_rows_that_complete_a_tile_change_no_slot(engine):
  """Not even one whose weights are not numbers."""
  state = engine.new_adapter(SPECS[0])
  nan = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), state.factors)
  engine.join(0, state.replace(factors=nan))
  engine.join(1, engine.new_adapter(SPECS[1]))
  engine.forward_backward([(1, datum_of(1, length=20))])
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(engine.leave(0).gradients))


def test_all_calls_keep_the_shardings_of_slots(engine):
  """A change would be another compilation of every program."""
  start = jax.tree.map(lambda leaf: leaf.sharding, engine._slots)
  engine.join(0, engine.new_adapter(SPECS[0]))
  engine.forward_backward([(0, datum_of(1, length=5))])
  engine.update(0, STEP)
  engine.leave(0)
  assert jax.tree.map(lambda leaf: leaf.sharding, engine._slots) == start


def test_joining_and_leaving_compiles_nothing(engine):
  from support.tiny import compilations

  engine.join(0, engine.new_adapter(SPECS[0]))
  engine.forward_backward([(0, datum_of(1, length=5))])
  engine.update(0, STEP)
  engine.leave(0)
  with compilations() as compiled:
    for slot, spec in enumerate((*SPECS[1:], AdapterSpec(rank=2, train_mlp=False))):
      engine.join(slot, engine.new_adapter(spec))
    engine.forward_backward([(slot, datum_of(slot, "ppo", length=7)) for slot in (2, 0, 1)])
    engine.update(1, AdamW())
    engine.leave(2)
  assert compiled == []


def test_merged_weights_are_those_of_the_formula(engine):
  """W + alpha / rank A B, with alpha = 32."""
  state = engine.new_adapter(AdapterSpec(rank=2, seed=4))
  rng = np.random.default_rng(0)
  factors = {path: np.float32(rng.normal(size=leaf.shape)) for path, leaf in state.factors.items()}
  merged = flatten_dict(engine.merged(state.replace(factors=factors)))
  base = flatten_dict(engine.base_params)
  for module in (("layers", "mlp", "wo"), ("layers", "attention", "query"), ("unembed",)):
    ends = ((), ()) if module == ("unembed",) else (("kernel",), ("kernel",))
    a = factors[(*module, "lora_a", *ends[0])]
    b = factors[(*module, "lora_b", *ends[1])]
    kernel = (*module, "kernel")
    b = b.reshape(*b.shape[: a.ndim - 1], -1)
    want = base[kernel] + 16 * (a @ b).reshape(base[kernel].shape)
    np.testing.assert_allclose(merged[kernel], want, rtol=1e-4, atol=1e-4)


def test_several_targets_per_token(engine):
  engine.join(0, engine.new_adapter(SPECS[1]))
  one = datum_of(4, length=6)
  targets = np.stack([one.targets, one.targets[::-1], np.arange(6)], 1)
  weights = np.stack([one.inputs["weights"], *np.zeros((2, 6), np.float32)], 1)
  several = Datum(one.tokens, targets, "cross_entropy", {"weights": weights})
  first, second = engine.forward([(0, one), (0, several)])
  assert second.log_probs.shape == (6, 3)
  np.testing.assert_allclose(second.log_probs[:, 0], first.log_probs, rtol=1e-5)
  np.testing.assert_allclose(second.loss, first.loss, rtol=1e-5)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"tokens": np.array([0, 48, 1])}, "ids from 0 to 48.*vocab_size=48"),
    ({"targets": np.array([0, -1, 1])}, "ids from -1 to 1"),
    ({"tokens": np.zeros(65, np.int64)}, r"\(65,\).*max_target_length"),
    ({"tokens": np.zeros(0, np.int64)}, r"\(0,\).*from 1 to 64"),
    ({"targets": np.array([0, 1])}, r"shape \(2,\).*3 tokens"),
    ({"targets": np.zeros((3, 1025), np.int64)}, "at most 1024 per token"),
    ({"loss": "stable_reinforce"}, "stable_reinforce.*is not available: use one of cross_entropy"),
    ({"inputs": {}}, "needs weights"),
    ({"inputs": {"weights": np.zeros(2)}}, r"weights has the shape \(2,\).*\(3,\)"),
    ({"inputs": {"weights": np.zeros(3), "mask": np.zeros(3)}}, "does not read mask"),
    ({"options": {"beta": 1.0}}, "cross_entropy does not read beta"),
    ({"loss": "ppo", "inputs": {}}, "ppo needs logprobs"),
  ],
)
def test_data_that_cannot_be_computed_are_refused(engine, change, message):
  three = Datum(np.arange(3), np.arange(3), "cross_entropy", {"weights": np.ones(3, np.float32)})
  engine.check(three)
  with pytest.raises(UserError, match=message):
    engine.check(dataclasses.replace(three, **change))


def test_adapters_out_of_bounds_are_refused(engine):
  with pytest.raises(UserError, match=r"rank=5 .* from 1 to 4.*max_lora_rank"):
    engine.new_adapter(AdapterSpec(rank=5))
  with pytest.raises(UserError, match="without parts"):
    engine.new_adapter(AdapterSpec(2, 0, False, False, False))


def test_tiles_that_rows_do_not_fill_are_refused():
  cfg, sharder, params = model_of()
  with pytest.raises(UserError, match="tile_tokens=96 must be a power of two"):
    AdapterEngine(cfg, sharder, params, num_slots=1, max_rank=1, max_length=64, tile_tokens=96)


@pytest.mark.slow
@pytest.mark.parametrize(
  "keys",
  [
    {"logits_via_embedding": True, "scan_layers": False},
    {"final_logits_soft_cap": 3.0, "logits_scaling": 2.0},
    {"lora_rank": 2},
    {"dtype": "bfloat16"},
  ],
)
def test_other_bases(keys):
  """A tied embedding, changed logits, a base with adapters, bfloat16: new adapters change nothing,
  and the merged model equals the model with a trained adapter."""
  engine = engine_of(1, **keys)
  engine.join(0, engine.new_adapter(SPECS[1]))
  datum = datum_of(2, length=10)
  tolerance = 0.1 if "dtype" in keys else 1e-4
  for trained in (False, True):
    if trained:
      engine.forward_backward([(0, datum)])
      engine.update(0, STEP)
    (result,) = engine.forward([(0, datum)])
    logits = reference_logits(engine, engine.merged(engine.read(0)), datum.tokens)
    want = jax.nn.log_softmax(logits)[np.arange(10), datum.targets]
    np.testing.assert_allclose(result.log_probs, want, rtol=tolerance, atol=tolerance)
  assert flatten_dict(engine.base_params)[("unembed", "kernel")].shape == (16, 48)
