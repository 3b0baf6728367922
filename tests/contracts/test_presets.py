"""Numbers of parameters: the published model's for every preset; the initialised one's."""

import math

import pytest

from maxlite.config import load_config
from maxlite.config.files import CONFIGS
from maxlite.models import MODELS
from maxlite.observe.flops import parameter_count
from maxlite.training.setup import build_trainer

PUBLISHED = {
  "llama2-7b": 6_738_415_616,
  "llama3-8b": 8_030_261_248,
  "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "models").glob("*.yml")))
def test_a_preset_has_the_published_number_of_parameters(name):
  model = load_config([f"model_name={name}"]).model
  assert parameter_count(model, moe=MODELS[model.decoder_block].is_moe) == PUBLISHED[name]


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("family", MODELS)
def test_the_count_is_that_of_the_initialised_parameters(family, tied):
  words = [f"decoder_block={family}", f"logits_via_embedding={tied}", "mlp_activations=[relu]"]
  cfg = load_config(words, needs_data=False)
  placements = build_trainer(cfg).placements
  counted = parameter_count(cfg.model, moe=MODELS[family].is_moe)
  assert sum(math.prod(placement.shape) for placement in placements) == counted
