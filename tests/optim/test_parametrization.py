"""Maximal update parametrization: the published factors, and activations that keep their size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from maxlite.config import load_config
from maxlite.ensemble.report.leaderboard import LeaderboardEntry, write_members
from maxlite.errors import UserError
from maxlite.models import Decoder
from maxlite.optim import build_optimizer, with_schedule_steps
from maxlite.optim.labels import logical_names, path_of
from maxlite.optim.parametrization import parameter_scale, scale_initial
from maxlite.sharding import Sharder, build_mesh
from tools.inspect.coordinate_check import activation_changes
from tools.inspect.learning_rate_transfer import read_losses
from tools.inspect.learning_rate_transfer import table as transfer_table

WIDTH = 8
KEYS = {
  "dataset_type": "synthetic",
  "vocab_size": 264,
  "base_emb_dim": WIDTH,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 2,
  "base_num_kv_heads": 2,
  "head_dim": 4,
  "base_mlp_dim": 2 * WIDTH,
  "base_moe_mlp_dim": 2 * WIDTH,
  "num_experts": 4,
  "sparse_matmul": False,
  "max_target_length": 16,
  "per_device_batch_size": 1,
  "warmup_steps_fraction": 0,
  "lr_schedule_type": "constant",
  "scan_layers": False,
}
MUP = {"parametrization": "mup", "mup_base_emb_dim": WIDTH}


def config_of(factor=1, **changes):
  """The tiny config at `factor` times its widths."""
  wider = ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads")
  wider += ("base_mlp_dim", "base_moe_mlp_dim")
  keys = KEYS | {key: KEYS[key] * factor for key in wider} | changes
  return load_config([f"{key}={value}" for key, value in keys.items()])


def shapes_and_names(cfg):
  """(parameters as shapes, their logical names)."""
  one_device = Sharder(build_mesh((1,) * 6, (1,) * 6, jax.devices()[:1]))
  model = Decoder(cfg, one_device)
  tokens_BT = jnp.zeros((1, 4), jnp.int32)
  boxed = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)["params"]
  return meta.unbox(boxed), logical_names(boxed)


def scales(cfg, **kwargs):
  """{path: (initial value, update)} of all parameters whose factors are not 1."""
  names = jax.tree_util.tree_leaves_with_path(shapes_and_names(cfg)[1])
  found = {path_of(key): parameter_scale(path_of(key), leaf, cfg, **kwargs) for key, leaf in names}
  return {path: tuple(scale) for path, scale in found.items() if tuple(scale) != (1, 1)}


ATTENTION = ("query", "key", "value", "out")
# Yang et al., Tensor Programs V (2022), table 3 with Adam, at 4 times the base width.
HIDDEN = {f"attention/{name}/kernel": (1, 1 / 4) for name in ATTENTION}
DENSE = HIDDEN | {f"mlp/{name}/kernel": (1, 1 / 4) for name in ("wi_0", "wi_1", "wo")}
EXPERTS = {f"moe/{name}": (1, 1 / 4) for name in ("wi_0", "wi_1", "wo")}
MOE = HIDDEN | EXPERTS | {"moe/router/kernel": (1 / 2, 1 / 4)}
EMBED = {"embed/embedding": (2, 1)}
UNEMBED = {"unembed/kernel": (1 / 2, 1 / 4)}


def layers(of_one):
  return {f"layers_{n}/{path}": scale for n in range(2) for path, scale in of_one.items()}


@pytest.mark.parametrize(("block", "of_layer"), [("llama", DENSE), ("mixtral", MOE)])
def test_factors_are_the_published_ones(block, of_layer):
  cfg = config_of(4, decoder_block=block, **MUP).model
  assert scales(cfg) == EMBED | UNEMBED | layers(of_layer)


@pytest.mark.parametrize("block", ["bamba", "lfm2"])
def test_taps_of_a_channel_do_not_depend_on_the_number_of_channels(block):
  keys = MUP | {"attention_layers": [1], "base_num_decoder_layers": 2, "mamba_num_heads": 8}
  cfg = config_of(4, decoder_block=block, **keys).model
  paths = [path_of(key) for key, _ in jax.tree.leaves_with_path(shapes_and_names(cfg)[0])]
  taps = {path for path in paths if path.endswith("_conv")}
  assert taps
  assert not taps & set(scales(cfg))


def test_factors_of_muon_follow_the_spectral_norm():
  cfg = config_of(4, decoder_block="llama", **MUP).model
  by_muon = {path: (1, 1 / 2) for path in DENSE}
  assert scales(cfg, updates="muon") == EMBED | UNEMBED | layers(by_muon)


def test_output_factors_move_into_norms_and_queries():
  tied = config_of(4, decoder_block="llama", logits_via_embedding=True, **MUP).model
  assert scales(tied) == EMBED | layers(DENSE) | {"final_norm/scale": (1 / 4, 1 / 4)}
  wider_heads = {"head_dim": 16, "mup_base_head_dim": 4}
  plain = scales(config_of(decoder_block="llama", **MUP, **wider_heads).model)
  assert plain == layers({"attention/query/kernel": (1 / 2, 1 / 2)})
  normed = scales(config_of(decoder_block="qwen3", **MUP, **wider_heads).model)
  assert normed == layers({"attention/query_norm/scale": (1 / 2, 1 / 2)})


def test_at_the_base_width_nothing_changes():
  cfg = config_of(decoder_block="mixtral", **MUP).model
  shapes, names = shapes_and_names(cfg)
  params = jax.tree.map(lambda leaf: np.full(leaf.shape, 3, leaf.dtype), shapes)
  jax.tree.map(np.testing.assert_array_equal, scale_initial(params, names, cfg), params)
  assert not scales(cfg)
  assert not scales(cfg, updates="muon")


def changes(factor, **keys):
  with jax.numpy_dtype_promotion("standard"):
    cfg = config_of(factor, learning_rate=0.02, base_num_decoder_layers=1, **keys)
    return activation_changes(cfg, num_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(
  "keys",
  [
    {"decoder_block": "llama", "logits_via_embedding": True},
    {"decoder_block": "mixtral"},
    {"decoder_block": "llama", "opt_type": "muon"},
  ],
  ids=lambda keys: " ".join(map(str, keys.values())),
)
def test_activations_move_alike_at_all_widths(keys):
  """A coordinate check of one layer after 3 steps at 16 times the width.

  Logits may shrink: they start at zero in the limit of infinite width.
  """
  narrow = changes(1, **keys, **MUP)
  wide = changes(16, **keys, **MUP)
  blocks = [module for module in narrow if module.startswith("layers")]
  for module in (*blocks, "logits"):
    assert 1 / 4 < wide[module] / narrow[module] < 2, (module, narrow, wide)
  standard = changes(16, **keys)
  assert max(standard[module] / narrow[module] for module in blocks) > 3


def test_the_decay_of_a_weight_does_not_depend_on_the_width():
  """Decoupled decay follows the learning rate alone, so wide models keep the tuned one."""
  keys = {"decoder_block": "llama", "learning_rate": 0.1, "adam_weight_decay": 0.5}
  cfg = config_of(4, **keys, **MUP)
  params = {"kernel": jnp.ones((4, 4))}
  names = {"kernel": jax.P("embed", "mlp")}
  schedule = with_schedule_steps(cfg.optimizer, 10)
  tx = build_optimizer(schedule, names, cfg.model)
  zeros = jax.tree.map(jnp.zeros_like, params)
  with jax.numpy_dtype_promotion("standard"):
    updates, _ = tx.update(zeros, tx.init(params), params)
  np.testing.assert_allclose(updates["kernel"], -0.05, rtol=1e-6)


@pytest.mark.parametrize(
  ("keys", "fix"),
  [
    ({"parametrization": "mup"}, "mup_base_emb_dim=64"),
    ({"mup_base_emb_dim": 8}, "parametrization=mup"),
    ({**MUP, "decoder_block": "gemma2"}, "parametrization=standard"),
    ({**MUP, "opt_type": "adafactor"}, "opt_type=adamw"),
    ({**MUP, "lora_rank": 4}, "parametrization=standard"),
    ({**MUP, "mup_base_head_dim": 4, "query_pre_attn_scalar": 4}, "mup_base_head_dim=0"),
  ],
  ids=str,
)
def test_what_mup_has_no_rule_for_is_refused(keys, fix):
  with pytest.raises(UserError, match=fix):
    config_of(**keys)


def test_the_table_of_a_sweep_marks_the_best_rate_of_every_width(tmp_path):
  """A member without a finite loss is never the best."""

  def entry(width, rate, loss):
    return LeaderboardEntry(
      "m", {"base_emb_dim": width, "learning_rate": rate}, 1, loss, loss, 1.0, "finished"
    )

  losses = [(64, 0.2, None), (64, 0.1, 1.5), (32, 0.1, 2.5), (32, 0.2, 2.25)]
  write_members([entry(*row) for row in losses], tmp_path / "members.jsonl")
  rows = transfer_table("run", read_losses(tmp_path)).splitlines()
  assert [row.split() for row in rows] == [
    ["run", "0.1", "0.2"],
    ["width", "32", "2.500", "2.250*"],
    ["width", "64", "1.500*", "inf"],
  ]
