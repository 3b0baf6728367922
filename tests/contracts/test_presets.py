"""Parameter counts of presets against published figures."""

import pytest
from support.slow_cases import fast_only

from maxlite.config import describe_changes, load_config
from maxlite.config.members import members_of
from maxlite.config.yaml_files import CONFIGS
from maxlite.metrics.flops import active_parameter_count, parameter_sizes

# Total and active parameters.
PUBLISHED = {
  "apertus-70b": (70_599_864_480, 70_599_864_480),
  "apertus-8b": (8_053_338_176, 8_053_338_176),
  "bamba-9b": (9_780_235_392, 9_780_235_392),
  "command-r-35b": (34_980_831_232, 34_980_831_232),
  "command-r-plus-104b": (103_810_674_688, 103_810_674_688),
  "command-r7b": (8_028_033_024, 8_028_033_024),
  "deepseek2-16b": (15_706_484_224, 2_661_150_208),
  "deepseek2-236b": (235_741_434_880, 21_375_800_320),
  "deepseek3-671b": (671_026_419_200, 37_552_297_472),
  "deepseek3.2-671b": (671_877_944_064, 38_403_822_336),
  "dots1-142b": (142_774_381_696, 14_016_588_928),
  "ernie4.5-0.3b": (360_748_032, 360_748_032),
  "ernie4.5-21b-a3b": (21_825_437_888, 3_352_150_208),
  "exaone4-1.2b": (1_279_391_488, 1_279_391_488),
  "exaone4-32b": (32_003_216_384, 32_003_216_384),
  "falcon-40b": (41_303_293_952, 41_303_293_952),
  "falcon-7b": (6_921_720_704, 6_921_720_704),
  "falcon-h1-0.5b": (521_411_104, 521_411_104),
  "falcon-rw-1b": (1_311_625_216, 1_311_625_216),
  "gemma-2b": (2_506_172_416, 2_506_172_416),
  "gemma-7b": (8_537_680_896, 8_537_680_896),
  "gemma2-2b": (2_614_341_888, 2_614_341_888),
  "gemma2-9b": (9_241_705_984, 9_241_705_984),
  "gemma3-27b": (27_009_346_304, 27_009_346_304),
  "gemma3-4b": (3_880_263_168, 3_880_263_168),
  "gemma4-26b": (25_233_141_790, 3_822_530_590),
  "gemma4-31b": (30_697_345_340, 30_697_345_340),
  "gemma4-e2b": (4_628_569_379, 4_628_569_379),
  "gemma4-e4b": (7_463_013_418, 7_463_013_418),
  "glm4-9b": (9_400_279_040, 9_400_279_040),
  "glm4.5-355b": (352_797_829_024, 33_632_266_144),
  "glm4.5-air-106b": (106_852_251_264, 13_424_129_664),
  "glm4.7-flash-30b": (29_943_393_920, 3_896_766_080),
  "glm5-744b": (743_911_218_432, 41_784_728_832),
  "gpt-neox-20b": (20_554_567_680, 20_554_567_680),
  "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
  "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
  "gpt2-124m": (124_439_808, 124_439_808),
  "gpt2-xl-1.5b": (1_557_611_200, 1_557_611_200),
  "granite3-1b-a400m": (1_334_628_352, 428_658_688),
  "granite3-8b": (8_170_848_256, 8_170_848_256),
  "granite4-h-small-32b": (32_207_337_984, 8_803_121_664),
  "granite4-h-tiny-7b": (6_939_037_248, 1_465_470_528),
  "hunyuan-7b": (7_504_568_320, 7_504_568_320),
  "hunyuan-80b-a13b": (80_393_183_232, 12_747_448_320),
  "kimi-k2-1t": (1_026_408_232_448, 32_861_500_928),
  "lfm2-1.2b": (1_170_340_608, 1_170_340_608),
  "lfm2-8b-a1b": (8_339_930_560, 1_557_740_992),
  "llama2-7b": (6_738_415_616, 6_738_415_616),
  "llama3-8b": (8_030_261_248, 8_030_261_248),
  "llama3.1-405b": (405_853_388_800, 405_853_388_800),
  "llama3.1-70b": (70_553_706_496, 70_553_706_496),
  "llama3.1-8b": (8_030_261_248, 8_030_261_248),
  "llama4-17b-128e": (400_711_848_960, 17_184_691_200),
  "llama4-17b-16e": (107_769_861_120, 17_172_894_720),
  "minimax-m2-230b": (228_689_764_864, 11_030_553_088),
  "ministral3-8b": (8_489_553_920, 8_489_553_920),
  "mistral-7b": (7_241_732_096, 7_241_732_096),
  "mistral-small-4-119b": (118_972_826_624, 6_632_588_288),
  "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
  "nanochat-d20-561m": (560_988_160, 560_988_160),
  "nanochat-d32-1.9b": (1_879_048_192, 1_879_048_192),
  "nemotron-h-8b": (8_100_852_736, 8_100_852_736),
  "nemotron-nano-9b-v2": (8_888_227_328, 8_888_227_328),
  "nemotron3-nano-30b-a3b": (31_577_940_288, 3_580_076_352),
  "olmo2-7b": (7_298_617_344, 7_298_617_344),
  "olmo3-32b": (32_233_522_176, 32_233_522_176),
  "olmo3-7b": (7_298_011_136, 7_298_011_136),
  "olmoe-7b": (6_919_161_856, 1_282_017_280),
  "opt-1.3b": (1_315_758_080, 1_315_758_080),
  "opt-6.7b": (6_658_473_984, 6_658_473_984),
  "phi2-2.7b": (2_779_683_840, 2_779_683_840),
  "phi3-mini-3.8b": (3_821_079_552, 3_821_079_552),
  "phi4-14b": (14_659_507_200, 14_659_507_200),
  "pythia-1.4b": (1_414_647_808, 1_414_647_808),
  "pythia-12b": (11_846_072_320, 11_846_072_320),
  "pythia-160m": (162_322_944, 162_322_944),
  "pythia-1b": (1_011_781_632, 1_011_781_632),
  "pythia-410m": (405_334_016, 405_334_016),
  "pythia-6.9b": (6_857_302_016, 6_857_302_016),
  "qwen1.5-moe-a2.7b": (14_315_784_192, 2_689_173_504),
  "qwen2.5-72b": (72_706_203_648, 72_706_203_648),
  "qwen2.5-7b": (7_615_616_512, 7_615_616_512),
  "qwen3-0.6b": (596_049_920, 596_049_920),
  "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
  "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
  "qwen3-32b": (32_762_123_264, 32_762_123_264),
  "qwen3-8b": (8_190_735_360, 8_190_735_360),
  "qwen3-next-80b-a3b": (79_674_391_296, 3_874_929_408),
  "qwen3.5-35b-a3b": (34_660_610_688, 3_454_988_928),
  "qwen3.5-397b-a17b": (396_346_350_336, 17_349_040_896),
  "qwen3.5-9b": (8_953_803_264, 8_953_803_264),
  "seed-oss-36b": (36_151_104_512, 36_151_104_512),
  "smollm3-3b": (3_075_098_624, 3_075_098_624),
  "starcoder2-15b": (15_957_889_024, 15_957_889_024),
  "starcoder2-3b": (3_030_371_328, 3_030_371_328),
}
OURS = {"deepseek2-tiny", "deepseek3.2-tiny"}

# Of different structures; the counts of the other presets are slow cases.
COUNTED_BY_DEFAULT = (
  "deepseek2-16b",
  "gemma4-e2b",
  "gpt-oss-20b",
  "gpt2-124m",
  "llama3.1-8b",
  "mixtral-8x7b",
  "phi2-2.7b",
  "qwen3-0.6b",
  "qwen3.5-35b-a3b",
)


def test_every_preset_is_covered():
  presets = {path.stem for path in (CONFIGS / "models").glob("*.yml")}
  assert presets == PUBLISHED.keys() | OURS


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_of_real_models_compute_in_bfloat16_with_rematerialization(name):
  cfg = load_config([f"model_name={name}"])
  policy = "full" if PUBLISHED[name][0] > 5e9 else "minimal"
  assert (cfg.model.dtype, cfg.model.weight_dtype) == ("bfloat16", "float32")
  assert cfg.model.remat_policy == policy
  assert {"dtype=bfloat16 (default float32)", f"remat_policy={policy} (default none)"} <= {
    *describe_changes(cfg)
  }


@pytest.mark.parametrize("name", fast_only(PUBLISHED, *COUNTED_BY_DEFAULT[:2]))
def test_a_file_or_an_argument_replaces_the_precision_of_a_preset(name, tmp_path):
  """And an ensemble's members share the ensemble's."""
  (tmp_path / "own.yml").write_text("dtype: float32\n")
  own = load_config([f"model_name={name}", str(tmp_path / "own.yml"), "remat_policy=none"])
  assert (own.model.dtype, own.model.remat_policy) == ("float32", "none")
  (member,) = members_of(load_config([f"members=[{{model_name: {name}}}]", "vocab_size=1024"]))
  assert (member.config.model.dtype, member.config.model.remat_policy) == ("float32", "none")


def test_the_preset_for_laptops_keeps_the_defaults():
  model = load_config(["model_name=deepseek2-tiny"]).model
  assert (model.dtype, model.remat_policy) == ("float32", "none")


def test_deepseek_v3_with_its_layer_of_multi_token_prediction_has_the_published_count():
  """684,531,386,000 numbers on the hub: these, and the scales of blocks in fp8."""
  model = load_config(["model_name=deepseek3-671b", "mtp_num_layers=1"]).model
  sizes = parameter_sizes(model)
  copies = 2 * model.vocab_size * model.base_emb_dim  # of embedding and output projection
  assert sum(sizes.values()) + copies == 684_489_845_504
  assert sum(sizes.values()) == PUBLISHED["deepseek3-671b"][0] + 11_610_068_224


@pytest.mark.parametrize("name", fast_only(PUBLISHED, *COUNTED_BY_DEFAULT))
def test_presets_have_the_published_parameter_counts(name):
  model = load_config([f"model_name={name}"]).model
  sizes = parameter_sizes(model)
  assert (sum(sizes.values()), active_parameter_count(sizes, model)) == PUBLISHED[name]
