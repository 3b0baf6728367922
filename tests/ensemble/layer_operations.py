"""Operations of jax.lax and layers of Flax: functions of (module, x_BHWC) that return an array.

`ragged_dot`, whose gradients JAX cannot vmap, is not here; those of vectors are in
fuzz_operations.py.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.scipy import linalg, signal, special

ROWS = 4
SHAPE = (ROWS, 6, 6, 4)  # of x_BHWC
_IMAGES = ("NHWC", "HWIO", "NHWC")


def _convolution(kernel, *, strides=(1, 1), padding="SAME", **options):
  """`jax.lax.conv_general_dilated` with a kernel of this shape."""

  def convolve(module, x):
    w = module.param("w", nn.initializers.normal(), kernel)
    return jax.lax.conv_general_dilated(
      x, w, strides, padding, dimension_numbers=_IMAGES, **options
    )

  return convolve


def _layer(kind, *args, **fields):
  return lambda _, x: kind(*args, **fields)(x)


def _of_array(function):
  return lambda _, x: function(x)


def _of_vectors(function):
  """Of x_BD, the means over the images."""
  return lambda module, x: function(module, x.mean((1, 2)))


def _of_matrices(function):
  """Of regular matrices [B, H, W]."""
  return lambda _, x: function(x[..., 0] + 9 * jnp.eye(6))


def _of_symmetric(function):
  def of_images(x):
    x = x[..., 0]
    return function(x @ x.mT + jnp.diag(jnp.arange(6) + 1.0))

  return _of_array(of_images)


def _cell(kind):
  return lambda _, x: nn.RNN(kind(5))(x.reshape(ROWS, 6, -1))


def _attention(_, x):
  return nn.MultiHeadDotProductAttention(num_heads=2)(x.reshape(ROWS, 36, 4))


def _local(_, x):
  return nn.ConvLocal(4, (2, 2))(x)


def _until_small(x):
  """A loop of as many iterations as the values need; it has no derivative by reverse mode."""
  start = jax.lax.stop_gradient(x)
  return x + jax.lax.while_loop(lambda y: jnp.abs(y).max() > 0.1, lambda y: y / 2, start)


def _conjugate_gradients(x):
  matrix = x[0, ..., 0] @ x[0, ..., 0].T + jnp.eye(6)
  return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x[0, 0, :, 1])[0]


def _resize(x):
  return jax.image.resize(x, (ROWS, 9, 5, 4), "bilinear")


def _scatter(kind):
  def scatter(x):
    index = jnp.argmax(x, axis=-1)
    target = jnp.ones((4, 4)).at[index]
    if kind == "mul":  # JAX has its gradient for unique indices only
      x = jax.lax.stop_gradient(x)
    return getattr(target, kind)(x)

  return _of_array(scatter)


def _reduce_window(start, combine):
  def reduce(x):
    return jax.lax.reduce_window(x, start, combine, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")

  return _of_array(reduce)


def _sampled(_, x):
  return x * jax.random.gamma(jax.random.key(0), jnp.abs(x) + 1)


def _spectral(_, x):
  return nn.SpectralNorm(nn.Dense(3))(x, update_stats=True)


CONVOLUTIONS = {
  "plain": _convolution((3, 3, 4, 6)),
  "grouped": _convolution((3, 3, 2, 6), feature_group_count=2),
  "grouped_twice_as_wide": _convolution((3, 3, 1, 8), feature_group_count=4),
  "depthwise": _convolution((3, 3, 1, 4), feature_group_count=4),
  "grouped_strided": _convolution((3, 3, 2, 6), strides=(2, 2), feature_group_count=2),
  "grouped_valid": _convolution((2, 3, 2, 6), padding="VALID", feature_group_count=2),
  "grouped_dilated": _convolution((3, 3, 2, 6), rhs_dilation=(2, 1), feature_group_count=2),
  "grouped_transposed": _convolution(
    (3, 3, 2, 6), padding=((1, 1), (1, 1)), lhs_dilation=(2, 2), feature_group_count=2
  ),
  "batch_groups": _convolution((3, 3, 4, 6), batch_group_count=2),
  "batch_groups_of_one": _convolution((3, 3, 4, 4), batch_group_count=4),
  "one_dimension": lambda _, x: nn.Conv(4, (3,), feature_group_count=2)(x[:, 0]),
  "three_dimensions": lambda _, x: nn.Conv(4, (3, 3, 2), feature_group_count=2)(x[..., None, :]),
  "layer_transposed": _layer(nn.ConvTranspose, 5, (3, 3), strides=(2, 2)),
  "layer_local": _local,
  "patches": lambda _, x: jax.lax.conv_general_dilated_patches(
    x, (2, 2), (1, 1), "SAME", dimension_numbers=_IMAGES
  ),
  "numpy": _of_array(lambda x: jnp.convolve(x[0, 0, :, 0], x[1, 0, :, 0])),
  "signal": _of_array(lambda x: signal.convolve2d(x[0, ..., 0], x[1, ..., 0])),
  "signal_fft": _of_array(lambda x: signal.fftconvolve(x[0, ..., 0], x[1, ..., 0])),
}
WINDOWS = {
  "avg_pool": _of_array(lambda x: nn.avg_pool(x, (2, 2))),
  "max_pool": _of_array(lambda x: nn.max_pool(x, (2, 2), (2, 2))),
  "window_sum": _reduce_window(0.0, jax.lax.add),
  "window_max": _reduce_window(-jnp.inf, jax.lax.max),
  "cumlogsumexp": _of_array(lambda x: jax.lax.cumlogsumexp(x, axis=1)),
  "cummax": _of_array(lambda x: jax.lax.cummax(x, axis=2)),
  "cummin": _of_array(lambda x: jax.lax.cummin(x, axis=2)),
  "cumprod": _of_array(lambda x: jax.lax.cumprod(x, axis=1)),
  "cumsum": _of_array(lambda x: jax.lax.cumsum(x, axis=1, reverse=True)),
  "resize": _of_array(_resize),
}
PRODUCTS = {
  "dot_general": _of_array(
    lambda x: jax.lax.dot_general(x, x, (((1,), (2,)), ((0, 3), (0, 3)))),
  ),
  "einsum": _of_array(lambda x: jnp.einsum("bhwc,bhvc,bvwc->bhv", x, x, x)),
  "attention": _attention,
  "tensordot": _of_array(lambda x: jnp.tensordot(x, x, ((1, 2), (2, 1)))),
}
MATRICES = {
  "cholesky": _of_symmetric(jnp.linalg.cholesky),
  "det": _of_matrices(jnp.linalg.det),
  "eigh": _of_symmetric(lambda x: jnp.linalg.eigh(x)[1]),
  "expm": _of_matrices(lambda x: linalg.expm(x / 20)),
  "inv": _of_matrices(jnp.linalg.inv),
  "lu": _of_matrices(lambda x: jax.lax.linalg.lu(x)[0]),
  "norm": _of_matrices(jnp.linalg.norm),
  "pinv": _of_matrices(jnp.linalg.pinv),
  "qr": _of_matrices(lambda x: jnp.linalg.qr(x)[1]),
  "slogdet": _of_matrices(lambda x: jnp.linalg.slogdet(x)[1]),
  "solve": _of_matrices(lambda x: jnp.linalg.solve(x, x[:, :1].mT)),
  "svd": _of_matrices(lambda x: jnp.linalg.svd(x)[1]),
  "triangular": _of_matrices(lambda x: linalg.solve_triangular(x[0], x[1, :1].T)),
  "tridiagonal": _of_matrices(
    lambda x: jax.lax.linalg.tridiagonal_solve(x[0, 0], 9 + x[0, 1], x[0, 2], x[0, 3:].T)
  ),
}
LOOPS = {
  "until_small": _of_array(_until_small),
  "conjugate_gradients": _of_array(_conjugate_gradients),
  "lstm": _cell(nn.OptimizedLSTMCell),
  "gru": _cell(nn.GRUCell),
  "root": _of_array(
    lambda x: jax.lax.custom_root(
      lambda y: y**3 + y - x,
      jnp.zeros_like(x),
      lambda f, y: jax.lax.fori_loop(0, 9, lambda _, z: z - f(z) / (3 * z**2 + 1), y),
      lambda g, y: y / g(jnp.ones_like(y)),
    )
  ),
}
ORDER = {
  "approx_max_k": _of_array(lambda x: jax.lax.approx_max_k(x, 2)[0]),
  "median": _of_array(lambda x: jnp.median(x, axis=1)),
  "quantile": _of_array(lambda x: jnp.quantile(x, 0.3, axis=(1, 2))),
  "searchsorted": _of_array(lambda x: jnp.searchsorted(jnp.arange(3.0), x) * x),
  "segment_max": _of_array(lambda x: jax.ops.segment_max(x, jnp.array([0, 1, 0, 1]), 2)),
  "sort_pairs": _of_array(lambda x: jax.lax.sort((x, x * x), dimension=1, num_keys=1)[1]),
  "scatter_add": _scatter("add"),
  "scatter_max": _scatter("max"),
  "scatter_min": _scatter("min"),
  "scatter_mul": _scatter("mul"),
  "scatter_set": _scatter("set"),
  "take_member_s_own": _of_array(lambda x: x[jnp.argmax(x[:, 0, 0, 0])]),
}
VALUES = {
  "betainc": _of_array(lambda x: special.betainc(2.0, 3.0, nn.sigmoid(x))),
  "digamma": _of_array(lambda x: special.digamma(jnp.abs(x) + 1)),
  "erf_inv": _of_array(lambda x: jax.lax.erf_inv(jnp.tanh(x))),
  "fft": _of_array(lambda x: jnp.abs(jnp.fft.fft2(x, axes=(1, 2))) ** 2),
  "gamma": _sampled,
  "gammainc": _of_array(lambda x: special.gammainc(2.0, jnp.abs(x))),
  "i0e": _of_array(special.i0e),
  "lgamma": _of_array(lambda x: special.gammaln(jnp.abs(x) + 1)),
}
LAYERS = {
  "batch_norm": _layer(nn.BatchNorm, use_running_average=False),
  "dense_general": _layer(nn.DenseGeneral, (2, 3), axis=(-2, -1)),
  "einsum_layer": _layer(nn.Einsum, (4, 5), "bhwc,cd->bhwd"),
  "group_norm": _layer(nn.GroupNorm, num_groups=2),
  "instance_norm": _layer(nn.InstanceNorm),
  "prelu": _layer(nn.PReLU),
  "spectral_norm": _spectral,
  "weight_norm": lambda _, x: nn.WeightNorm(nn.Dense(3))(x),
}


def all_operations(of_vectors):
  """All operations by name, with those of x_BD in `of_vectors`."""
  operations = {f"vector_{name}": _of_vectors(op) for name, op in of_vectors.items()}
  for table in (CONVOLUTIONS, WINDOWS, PRODUCTS, MATRICES, LOOPS, ORDER, VALUES, LAYERS):
    assert not operations.keys() & table.keys()
    operations |= table
  return operations
