"""audit_period: a flipped bit in parameters, gradients, optimizer state or an exchange is named."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.faulty_device import WrongDevice
from support.slow_cases import slow
from support.tiny import ROWS, build, config_of, mesh_keys, place, uneven_batch
from support.tiny_run import checkpoint_steps, start

from maxlite.optim.labels import paths_in
from maxlite.registry import FEATURES, FeatureEntry
from maxlite.training.feature import Feature
from maxlite.training.features.step_audit import AuditTrainer
from maxlite.training.loop import WrongStepError
from maxlite.training.trainer import open_trainer

KEYS = {"audit_period": 2, "decoder_block": "llama", "global_batch_size": ROWS} | mesh_keys(
  "data=2 fsdp=2"
)
KERNEL = "layers_0/mlp/wi_0/kernel"
MOE = {"decoder_block": "mixtral", "sparse_matmul": True}
PHASES = (
  "[{name: a, train: ['.*mlp.*'], steps: 1}, "
  "{name: b, train: ['.*attention.*'], steps: 1, gradient_accumulation_steps: 2}]"
)


@pytest.fixture(scope="module")
def program():
  return build(config_of(**KEYS), jax.devices()[:4])


@pytest.fixture
def trainer(program):
  """After the first step, of which the second is audited."""
  trainer = open_trainer(config_of(**KEYS), program, program.init(0))
  assert isinstance(trainer, AuditTrainer)
  take_step(trainer, 0)
  return trainer


def take_step(trainer, seed):
  trainer.step(trainer.program.with_extra_inputs(place(trainer.program, uneven_batch(seed))))


def flip(x, bit=12):
  """x with a flipped bit of its mantissa in one element."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
  flipped = bits.at[5].set(bits[5] ^ jnp.uint32(1 << bit)).reshape(x.shape)
  return jax.lax.bitcast_convert_type(flipped, jnp.float32)


def at_path(tree, wanted, change):
  """The tree with the leaf whose path ends in `wanted` changed."""
  leaves = [
    change(leaf) if path.endswith(wanted) else leaf
    for path, leaf in zip(paths_in(tree), jax.tree.leaves(tree), strict=True)
  ]
  return jax.tree.unflatten(jax.tree.structure(tree), leaves)


class WrongGradient(Feature):
  """Flips a bit of the gradient of a kernel."""

  def wrap_gradients(self, gradients_of):
    def wrong(*arguments):
      result = gradients_of(*arguments)
      return result._replace(gradients=at_path(result.gradients, KERNEL, flip))

    return wrong


class WrongOptimizerState(Feature):
  """Flips a bit of a moment after the update."""

  def wrap_step(self, step, objective):
    def wrong(state, inputs):
      state, metrics = step(state, inputs)
      return state.replace(opt_state=at_path(state.opt_state, f"mu/{KERNEL}", flip)), metrics

    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
  "keys",
  [
    {},
    MOE | {"dtype": "bfloat16"},
    MOE | {"router_jitter": 0.1},
    {"phases": PHASES},
    {"ici_data_parallelism": 1, "ici_fsdp_parallelism": 1},
  ],
)
def test_right_steps_pass(keys):
  cfg = config_of(**KEYS | keys)
  num_devices = cfg.mesh.ici_data_parallelism * cfg.mesh.ici_fsdp_parallelism
  program = build(cfg, jax.devices()[:num_devices])
  trainer = open_trainer(cfg, program, program.init(0))
  for seed in range(4):
    take_step(trainer, seed)
  assert int(trainer.state.step) == 4


def test_a_flipped_bit_of_the_parameters_between_steps_is_named(trainer):
  params = at_path(trainer.state.params, KERNEL, flip)
  trainer.state = trainer.state.replace(params=params)
  with pytest.raises(
    WrongStepError, match=f"step 2: audit: params/{KERNEL} has other bits than after"
  ):
    take_step(trainer, 1)


@pytest.mark.slow
def test_a_flipped_bit_on_one_device_is_named(trainer):
  def flip_last(array):
    shards = [shard.data for shard in array.addressable_shards]
    shards[-1] = jax.device_put(flip(shards[-1]), shards[-1].device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)

  params = at_path(trainer.state.params, KERNEL, flip_last)
  trainer.state = trainer.state.replace(params=params)
  with pytest.raises(WrongStepError, match=rf"params/{KERNEL} .*(device 3|device 1)"):
    take_step(trainer, 1)


@pytest.mark.parametrize(
  ("fault", "named"),
  [
    (WrongGradient, rf"params/{KERNEL} has other bits when the step is computed again"),
    slow(WrongOptimizerState, rf"opt_state/.*mu/{KERNEL} has other bits when the step is computed"),
  ],
)
def test_a_bit_that_flips_once_in_a_step_is_named(program, fault, named):
  wrong = dataclasses.replace(program, features=(*program.features, fault()))
  program = dataclasses.replace(program)
  steps = iter([program.step, wrong.step, program.step])

  def take_next(state, inputs):
    return next(steps)(state, inputs)

  vars(program)["step"] = take_next
  trainer = AuditTrainer(config_of(**KEYS), program, program.init(0))
  take_step(trainer, 0)
  with pytest.raises(WrongStepError, match=named):
    take_step(trainer, 1)


def test_a_device_that_is_always_wrong_is_found_by_another_one(program):
  wrong = dataclasses.replace(program, features=(*program.features, WrongDevice()))
  trainer = AuditTrainer(config_of(**KEYS), wrong, wrong.init(0))
  take_step(trainer, 0)
  with pytest.raises(
    WrongStepError, match=r"the gradient of \S+ differs in another arrangement by"
  ):
    take_step(trainer, 1)


@pytest.mark.slow
def test_with_audit_action_warn_training_goes_on(program, trainer, capsys):
  trainer.cfg = config_of(**KEYS, audit_action="warn")
  params = at_path(trainer.state.params, KERNEL, flip)
  trainer.state = trainer.state.replace(params=params)
  take_step(trainer, 1)
  printed = capsys.readouterr().err.splitlines()
  assert len(printed) == 1  # in all else, the step is right
  assert f"step 2: audit: params/{KERNEL} has other bits" in printed[0]
  assert int(trainer.state.step) == 2


@pytest.mark.slow
def test_a_run_with_a_fault_ends_without_saving_its_state(folder):
  FEATURES["wrong"] = FeatureEntry(lambda request: WrongDevice())
  try:
    code, output = start(
      folder,
      **mesh_keys("data=2 fsdp=4"),
      audit_period=3,
      router_jitter=0,
      gradient_accumulation_steps=1,
      checkpoint_period=2,
    )
  finally:
    del FEATURES["wrong"]
  assert code == 1
  assert "step 3: audit: the gradient of" in output
  assert checkpoint_steps(folder) == [2]
