"""Operations of drawn modules: functions of (module, x_BD) that return an array [B, any]."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp


@jax.custom_jvp
def _scaled_jvp(x):
  return 2 * x


_scaled_jvp.defjvps(lambda dx, ans, x: 3 * dx + 0 * ans)


@jax.custom_vjp
def _scaled_vjp(x):
  return x * 0.5


_scaled_vjp.defvjp(lambda x: (x * 0.5, jnp.cos(x)), lambda cos, dy: (dy * cos,))


@jax.custom_batching.sequential_vmap
def _sequential(x):
  return jnp.sin(x) + x


def _heads(module, x):
  x_BHC = nn.Dense(6)(x).reshape(x.shape[0], 3, 2)
  return nn.dot_product_attention(x_BHC, x_BHC, x_BHC).reshape(x.shape[0], -1)


def _loop(x):
  def body(_, carry):
    n, y = carry
    return n + 1, jnp.tanh(y * 1.5)

  n, y = jax.lax.fori_loop(0, 3, body, (0, x))
  return y + n


def _scan_units(x):
  def step(carry_B, unit_B):
    return 0.5 * carry_B + unit_B, jnp.tanh(carry_B)

  last_B, y_DB = jax.lax.scan(step, x[:, 0], x.T)
  return jnp.concatenate([y_DB.T, last_B[:, None]], axis=1)


def _swap_halves(x):
  halves = jnp.split(jnp.concatenate([x, 2 * x], axis=1), 2, axis=1)
  return jnp.concatenate(halves[::-1], axis=1)


def _scatter_ragged(x):
  target_D = (jnp.arange(x.shape[1]) * 2) % 3
  return jnp.zeros((x.shape[0], 3)).at[:, target_D].add(x)


def _bfloat16(module, x):
  narrow_BD = nn.Dense(3, dtype=jnp.bfloat16)(x)
  return narrow_BD.astype(jnp.float32) * 0.1 + x[:, :1]


def _conv(module, x):
  y_BDC = nn.Conv(2, (2,))(x[..., None])
  return y_BDC.reshape(x.shape[0], -1)


def _embed(module, x):
  unit_D = jnp.arange(x.shape[1])
  return x[:, :1] + nn.Embed(9, 4)(unit_D).sum(0)


def _scanned(module, x):
  scan = nn.scan(_Layer, {"params": 0}, split_rngs={"params": True}, length=2)
  y_BD, _ = scan(x.shape[1])(x, None)
  return y_BD


def _weights(module, x):
  weight_11 = module.param(f"w{x.ndim}", nn.initializers.normal(), (1, 1))
  return x * weight_11


ELEMENTWISE = {
  "abs": jnp.abs,
  "arctan": jnp.arctan,
  "arctan2": lambda x: jnp.arctan2(x, 2.0),
  "cbrt": lambda x: jnp.cbrt(jnp.abs(x) + 1),
  "clip": lambda x: jnp.clip(x, -0.7, 0.9),
  "cos": jnp.cos,
  "cosh": lambda x: jnp.cosh(jnp.tanh(x)),
  "elu": nn.elu,
  "erf": jax.lax.erf,
  "exp": lambda x: jnp.exp(-jnp.abs(x)),
  "exp2": lambda x: jnp.exp2(jnp.tanh(x)),
  "expm1": lambda x: jnp.expm1(jnp.tanh(x)),
  "floor": lambda x: x - jnp.floor(x),
  "gelu": nn.gelu,
  "hard_tanh": nn.hard_tanh,
  "integer_power": lambda x: jnp.tanh(x) ** 3,
  "leaky_relu": nn.leaky_relu,
  "log": lambda x: jnp.log(jnp.abs(x) + 1),
  "log1p": lambda x: jnp.log1p(x * x),
  "logaddexp": lambda x: jnp.logaddexp(x, 0.5),
  "minimum": lambda x: jnp.minimum(x, 0.3),
  "mod": lambda x: jnp.mod(x, 3.0),
  "number_minus": lambda x: 1 - x,
  "number_over": lambda x: 1 / (x * x + 1),
  "power": lambda x: (jnp.abs(x) + 1) ** 1.5,
  "relu": nn.relu,
  "round": lambda x: x + jnp.round(x),
  "rsqrt": lambda x: jax.lax.rsqrt(x * x + 1),
  "sigmoid": nn.sigmoid,
  "sign": lambda x: jnp.sign(x) * x,
  "silu": nn.silu,
  "sin": jnp.sin,
  "softplus": nn.softplus,
  "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
  "square": jnp.square,
  "stop_gradient": lambda x: x + jax.lax.stop_gradient(jnp.sin(x)),
  "tanh": jnp.tanh,
  "where": lambda x: jnp.where(x > 0, x, jnp.exp(x) - 1),
  "where_logical": lambda x: jnp.where((x > -1) & ~(x > 1) | (x == 2), x, 0.0),
}
REDUCTIONS = {
  "all_any": lambda x: x + jnp.all(x < 9, axis=1, keepdims=True) - jnp.any(x > 9),
  "argmax": lambda x: x + jnp.argmax(x, axis=1, keepdims=True),
  "cumprod": lambda x: jnp.cumprod(1 + 0.1 * jnp.tanh(x), axis=1),
  "cumsum": lambda x: jnp.cumsum(x, axis=1),
  "log_softmax": nn.log_softmax,
  "logsumexp": lambda x: x - nn.logsumexp(x, axis=1, keepdims=True),
  "max": lambda x: x - jnp.max(x, axis=1, keepdims=True),
  "mean": lambda x: x - jnp.mean(x, axis=1, keepdims=True),
  "min": lambda x: x - jnp.min(x, axis=0, keepdims=True),
  "norm": lambda x: x / (1 + jnp.linalg.norm(x + 0.1, axis=1, keepdims=True)),
  "prod": lambda x: x * jnp.prod(1 + 0.1 * jnp.tanh(x), axis=1, keepdims=True),
  "softmax": nn.softmax,
  "sort": lambda x: jnp.sort(x, axis=1),
  "standardize": nn.standardize,
  "std": lambda x: x / jnp.sqrt(1 + jnp.var(x, axis=1, keepdims=True)),
  "top_k": lambda x: jax.lax.top_k(x, 2)[0],
}
MOVES = {
  "broadcast": lambda x: jnp.broadcast_to(x[:, :1], x.shape) + x,
  "concatenate": lambda x: jnp.concatenate([x, -x, x[:, :1]], axis=1),
  "dynamic_slice": lambda x: jax.lax.dynamic_slice_in_dim(x, jnp.argmax(x[:, 0]) % 2, 2, axis=1),
  "dynamic_update": lambda x: jax.lax.dynamic_update_slice(x, x[:, :1] * 2, (0, 1)),
  "einsum": lambda x: jnp.einsum("bd,cd,ce->be", x, x, x) / 9,
  "flip": lambda x: jnp.flip(x, axis=1),
  "gather": lambda x: x[:, jnp.array([1, 0, 1])],
  "gather_own": lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1),
  "gather_ragged": lambda x: jnp.cos(jnp.arange(9.0))[(x > 0).astype(jnp.int32)],
  "gram": lambda x: x @ x.T / x.shape[1],
  "iota": lambda x: x + 0.1 * jnp.arange(x.shape[1], dtype=x.dtype),
  "one_hot": lambda x: nn.one_hot(jnp.argmax(x, axis=1), 3) + x[:, :1],
  "outer": lambda x: (x[:, :, None] * x[:, None, :]).reshape(x.shape[0], -1),
  "pad": lambda x: jnp.pad(x, ((0, 0), (1, 2)), constant_values=0.5),
  "reverse_roll": lambda x: jnp.roll(x, 1, axis=1),
  "scatter_add": lambda x: x.at[:, jnp.array([0, 1, 0])].add(x[:, :1]),
  "scatter_ragged": _scatter_ragged,
  "scatter_set": lambda x: x.at[:, 1].set(0.25),
  "segment_sum": lambda x: jax.ops.segment_sum(x.T, jnp.arange(x.shape[1]) % 2, 2).T,
  "slice": lambda x: x[:, 1:],
  "slice_half": lambda x: x[:, x.shape[1] // 2 :],
  "split": _swap_halves,
  "stack": lambda x: jnp.stack([x, x * x], axis=2).reshape(x.shape[0], -1),
  "strided": lambda x: x[:, ::2],
  "tril": lambda x: x @ jnp.tril(jnp.ones((x.shape[1], x.shape[1]))),
}
CONTROL = {
  "associative_scan": lambda x: jax.lax.associative_scan(jnp.add, x, axis=1),
  "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)) + x),
  "cond": lambda x: jax.lax.cond(x.sum() > 0, lambda: x * 1.5, lambda: -x),
  "custom_jvp": _scaled_jvp,
  "custom_vjp": _scaled_vjp,
  "inner_jit": jax.jit(lambda x: jnp.exp(-x * x) + x),
  "loop": _loop,
  "map": lambda x: jax.lax.map(jnp.tanh, x),
  "scan": _scan_units,
  "sequential": lambda x: x + _sequential(jax.lax.stop_gradient(x)),
  "switch": lambda x: jax.lax.switch(jnp.argmax(x[0]) % 2, [jnp.sin, jnp.cos], x),
  "vmap": jax.vmap(lambda row: row * row.sum()),
}
MODULES = {
  "attention": _heads,
  "batch_norm": lambda _, x: nn.BatchNorm(use_running_average=False, momentum=0.5)(x),
  "bfloat16": _bfloat16,
  "conv": _conv,
  "dense": lambda _, x: nn.Dense(x.shape[1] + 1)(x),
  "dropout": lambda _, x: nn.Dropout(0.4, deterministic=False)(x),
  "embed": _embed,
  "group_norm": lambda _, x: nn.GroupNorm(num_groups=1)(x),
  "layer_norm": lambda _, x: nn.LayerNorm()(x),
  "noise": lambda module, x: x + jax.random.normal(module.make_rng("params"), (x.shape[0], 1)),
  "rms_norm": lambda _, x: nn.RMSNorm()(x),
  "scanned": _scanned,
  "weights": _weights,
}


class _Layer(nn.Module):
  width: int

  @nn.compact
  def __call__(self, x, _):
    return x + nn.tanh(nn.Dense(self.width)(x)), None


def _of_array(function):
  """The same function with the module as its first argument."""
  return lambda _, x: function(x)


def _all_operations():
  """All operations by name; no two tables have one name."""
  operations = {}
  for table in (ELEMENTWISE, REDUCTIONS, MOVES, CONTROL):
    assert not operations.keys() & table.keys()
    operations |= {name: _of_array(function) for name, function in table.items()}
  assert not operations.keys() & MODULES.keys()
  return operations | MODULES


OPERATIONS = _all_operations()
ACTIVATIONS = [
  nn.relu,
  nn.gelu,
  jnp.sin,
  jnp.cos,
  functools.partial(nn.leaky_relu, negative_slope=0.2),
]
