"""Actor-critic with a shared trunk and two optimizers, on a walk along a corridor.

The agent starts in the middle of nine cells; the last cell gives a reward of 1, the first -1. The
critic trains the trunk and its head by four updates on each batch; then the actor trains the trunk
and its own head with another optimizer. A target network of the critic follows without a gradient.

python docs/examples/actor_critic.py [--rounds 150]
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from maxlite.phases import Alternation, Phase

CELLS, STEPS, DISCOUNT = 9, 24, 0.95


class ActorCritic(nn.Module):
  def setup(self):
    self.trunk = nn.Dense(32)
    self.actor, self.critic = nn.Dense(2), nn.Dense(1)

  def __call__(self, cell_B):
    x_BF = nn.tanh(self.trunk(jax.nn.one_hot(cell_B, CELLS)))
    return self.actor(x_BF), self.critic(x_BF)[:, 0]


def apply(networks, cell_B):
  return model.apply({"params": networks}, cell_B)


def returns(target, batch):
  """Reward, plus the target network's discounted value of the next cell."""
  _, next_value_B = apply(target, batch["next"])
  return batch["reward"] + DISCOUNT * jnp.where(batch["done"], 0, next_value_B)


def critic_loss(params, batch):
  _, value_B = apply(params["online"], batch["cell"])
  return jnp.mean((value_B - returns(params["target"], batch)) ** 2)


def actor_loss(params, batch):
  logits_BA, value_B = apply(params["online"], batch["cell"])
  log_p_BA = jax.nn.log_softmax(logits_BA)
  log_p_B = jnp.take_along_axis(log_p_BA, batch["action"][:, None], axis=1)[:, 0]
  advantage_B = jax.lax.stop_gradient(returns(params["target"], batch) - value_B)
  entropy = -jnp.mean(jnp.sum(jnp.exp(log_p_BA) * log_p_BA, axis=1))
  return -jnp.mean(log_p_B * advantage_B) - 0.01 * entropy, {"entropy": entropy}


def follow(params, batch):
  moved = optax.incremental_update(params["online"], params["target"], 0.2)
  return params | {"target": moved}


@jax.jit
def play(params, key, num_episodes=32):
  """Transitions of episodes of the current policy, and the mean reward of an episode."""

  def step(carry, key):
    cell_B, done_B = carry
    logits_BA, _ = apply(params["online"], cell_B)
    action_B = jax.random.categorical(key, logits_BA)
    next_B = jnp.where(done_B, cell_B, cell_B + 2 * action_B - 1)
    ends_B = (next_B == 0) | (next_B == CELLS - 1)
    reward_B = jnp.where(done_B | ~ends_B, 0.0, jnp.where(next_B == 0, -1.0, 1.0))
    row = {"cell": cell_B, "action": action_B, "next": next_B, "reward": reward_B, "done": ends_B}
    return (next_B, ends_B), row

  start = (jnp.full(num_episodes, CELLS // 2), jnp.zeros(num_episodes, bool))
  _, rows_TB = jax.lax.scan(step, start, jax.random.split(key, STEPS))
  batch = {name: x_TB.reshape(-1) for name, x_TB in rows_TB.items()}
  return batch, jnp.sum(batch["reward"]) / num_episodes


parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=150)
rounds = parser.parse_args().rounds
console = Console(highlight=False, soft_wrap=True)

model = ActorCritic()
networks = model.init(jax.random.key(0), jnp.zeros(1, jnp.int32))["params"]
trunk = "online/trunk/.*"
alternation = Alternation(
  [
    Phase(
      "critic",
      train=[trunk, "online/critic/.*"],
      loss=critic_loss,
      optimizer=optax.adam(1e-2),
      steps=1,
      repeat_batch=4,
    ),
    Phase(
      "actor",
      train=[trunk, "online/actor/.*"],
      loss=actor_loss,
      optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(3e-3)),
      steps=1,
    ),
    Phase("follow", train=["target/.*"], update=follow, steps=1),
  ]
)
state = alternation.init({"online": networks, "target": networks})
for number in range(1, rounds + 1):
  batch, reward = play(state.params, jax.random.key(number))
  for _ in alternation.phases:
    state, metrics = alternation.step(state, batch)
  if number % 50 == 0 or number == rounds:
    console.print(f"round {number:3}  reward of an episode {reward:.2f}")
