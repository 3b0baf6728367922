"""The schema: every config key with its type, default, range and doc. No default lives elsewhere.

Keys are flat on the command line and in YAML; `Config` groups them in sections. From `layers` up,
code takes a section such as `ModelConfig`, never the root. Keys have MaxText's name where MaxText
has the key. Importing the schema does not import JAX, so mistakes are reported within 0.1 s.
"""

import dataclasses
import itertools

from maxlite.config.config_field import KeyValue, SchemaKey, walk
from maxlite.config.config_field import Section as Section
from maxlite.config.config_field import SectionClass as SectionClass
from maxlite.config.config_field import build as build
from maxlite.config.config_field import entry_keys as entry_keys
from maxlite.config.config_field import flatten as flatten
from maxlite.config.schema.data_config import DataConfig
from maxlite.config.schema.ensemble_config import EnsembleConfig
from maxlite.config.schema.entries import ENTRIES as ENTRIES
from maxlite.config.schema.entries import PhaseConfig as PhaseConfig
from maxlite.config.schema.entry_point_config import (
  DEFAULT_NEW_TOKENS as DEFAULT_NEW_TOKENS,
)
from maxlite.config.schema.entry_point_config import (
  AuditConfig,
  ConvertConfig,
  GenerateConfig,
  InspectConfig,
  PlanConfig,
  ServeConfig,
  TokenizerConfig,
)
from maxlite.config.schema.model_config import FLOAT_TYPES as FLOAT_TYPES
from maxlite.config.schema.model_config import CycleConfig as CycleConfig
from maxlite.config.schema.model_config import GatedDeltaConfig as GatedDeltaConfig
from maxlite.config.schema.model_config import LatentAttentionConfig as LatentAttentionConfig
from maxlite.config.schema.model_config import LoraConfig as LoraConfig
from maxlite.config.schema.model_config import MambaConfig as MambaConfig
from maxlite.config.schema.model_config import ModelConfig
from maxlite.config.schema.model_config import MultiplierConfig as MultiplierConfig
from maxlite.config.schema.model_config import RopeConfig as RopeConfig
from maxlite.config.schema.model_config import ShortConvConfig as ShortConvConfig
from maxlite.config.schema.moe_config import MoeConfig as MoeConfig
from maxlite.config.schema.moe_config import TilesConfig as TilesConfig
from maxlite.config.schema.rollout_config import RolloutConfig as RolloutConfig
from maxlite.config.schema.run_config import MESH_AXES as MESH_AXES
from maxlite.config.schema.run_config import AxisRules as AxisRules
from maxlite.config.schema.run_config import (
  CheckpointConfig,
  HostsConfig,
  MeshConfig,
  ObserveConfig,
  RunConfig,
)
from maxlite.config.schema.training_config import PHASE_STRATEGIES as PHASE_STRATEGIES
from maxlite.config.schema.training_config import (
  LocalUpdatesConfig,
  OptimizerConfig,
  PhasesConfig,
  TrainingConfig,
)


@dataclasses.dataclass(frozen=True)
class Config:
  """The resolved configuration of one command."""

  run: RunConfig = RunConfig()
  hosts: HostsConfig = HostsConfig()
  mesh: MeshConfig = MeshConfig()
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  training: TrainingConfig = TrainingConfig()
  rollouts: RolloutConfig = RolloutConfig()
  local_updates: LocalUpdatesConfig = LocalUpdatesConfig()
  phasing: PhasesConfig = PhasesConfig()
  ensemble: EnsembleConfig = EnsembleConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  observe: ObserveConfig = ObserveConfig()
  generate: GenerateConfig = GenerateConfig()
  serve: ServeConfig = ServeConfig()
  plan: PlanConfig = PlanConfig()
  audit: AuditConfig = AuditConfig()
  convert: ConvertConfig = ConvertConfig()
  tokenizer: TokenizerConfig = TokenizerConfig()
  inspect: InspectConfig = InspectConfig()


KEYS: dict[str, SchemaKey] = {key.name: key for key in walk(Config)}
SECTIONS: dict[str, list[SchemaKey]] = {
  section.__name__.removesuffix("Config").lower(): list(keys)
  for section, keys in itertools.groupby(KEYS.values(), lambda key: key.section)
}
DEFAULTS: dict[str, KeyValue] = {key.name: key.default for key in KEYS.values()}
