"""Log-probabilities of the engine are those of the model of training, for every family."""

import jax
import numpy as np
import pytest
import tiny_families as families
from support.slow_cases import fast_only, slow

from maxlite.config.model_families import MODELS
from maxlite.inference import scoring
from maxlite.inference.engine import Engine
from maxlite.inference.inference_params import inference_model, inference_params

pytestmark = pytest.mark.usefixtures("fast_programs")
LENGTHS = (3, 19)  # the longer one is padded to 24, past every window
FAST = ("gpt_oss",)  # experts, windows and sinks


def engine_of(cfg, sharder, params):
  return Engine(
    inference_model(cfg, sharder),
    inference_params(cfg, params),
    num_rows=sharder.num_shards("activation_batch"),
    max_length=24,
    stop_token_ids=[0],
  )


def assert_scores(model, params, engine, lengths=LENGTHS):
  apply = families.jit(model.apply)
  for length in lengths:
    tokens = np.random.default_rng(length).integers(48, size=length).astype(np.int32)
    log_p_TV = jax.nn.log_softmax(apply({"params": params}, tokens[None])[0])
    first, *scores = engine.score(tokens.tolist())
    assert first is None
    found = [score.log_prob for score in scores]
    expected = np.asarray(log_p_TV)[np.arange(length - 1), tokens[1:]]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    best = [score.top[0][0] for score in scores]
    assert best == np.argmax(log_p_TV[:-1], axis=-1).tolist()


@pytest.mark.parametrize("family", fast_only(MODELS, *FAST))
def test_scores_are_those_of_the_model_of_training(family, params_of):
  model = families.model_of(family)
  params = params_of(family)
  assert_scores(model, params, engine_of(model.cfg, families.sharder_of(), params))


@pytest.mark.parametrize(
  ("family", "mesh"),
  [("llama", {"fsdp": 2, "tensor": 2}), slow("qwen3_moe", {"data": 2, "expert": 2, "tensor": 2})],
)
def test_scores_do_not_depend_on_the_mesh(family, mesh, params_of, monkeypatch):
  """Also in several chunks of positions, the last of which is padded."""
  monkeypatch.setattr(scoring, "_CHUNK_TOKENS", 5 * mesh.get("fsdp", 1) * mesh.get("data", 1))
  model = families.model_of(family)
  params = params_of(family)
  engine = engine_of(model.cfg, families.sharder_of(**mesh), params)
  assert_scores(model, params, engine, LENGTHS[1:])
