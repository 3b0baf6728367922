"""Every preset of configs/models/ is the published model, by its number of parameters."""

import pytest

from maxlite.config import load_config
from maxlite.config.files import CONFIGS
from maxlite.models import MODELS
from maxlite.observe.flops import parameter_count

PUBLISHED = {
  "llama2-7b": 6_738_415_616,
  "llama3-8b": 8_030_261_248,
  "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "models").glob("*.yml")))
def test_a_preset_has_the_published_number_of_parameters(name):
  model = load_config([f"model_name={name}"]).model
  assert parameter_count(model, moe=MODELS[model.decoder_block].is_moe) == PUBLISHED[name]
