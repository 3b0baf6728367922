"""Rules on the keys of generating text, serving and planning."""

from maxlite.config.rules.path_rules import is_file
from maxlite.config.rules.violation import Violation, Violations
from maxlite.config.schema import Config


def generation(cfg: Config) -> Violations:
  """The rules of sampling."""
  generate = cfg.generate
  if generate.max_new_tokens == 0:
    key = "max_new_tokens"
    yield Violation([key], f"generates nothing; write {key}=1 or more, or {key}=-1")
  if generate.decode_sampling_nucleus_p == 0:
    key = "decode_sampling_nucleus_p"
    yield Violation([key], f"keeps no token; write {key}=0.95, or 1 for all")
  if generate.decode_sampling_repetition_penalty == 0:
    key = "decode_sampling_repetition_penalty"
    yield Violation([key], f"logits are divided by it; write {key}=1 for none")


def hardware(cfg: Config) -> Violations:
  """The rules on the devices for which a plan compiles."""
  plan = cfg.plan
  if plan.compile_topology_num_slices > 1 and not plan.compile_topology:
    yield Violation(
      ["compile_topology_num_slices", "compile_topology"],
      "slices need a topology; write compile_topology=v5p-64 or another",
    )
  if plan.gpu_target_config and not is_file(plan.gpu_target_config):
    yield Violation(
      ["gpu_target_config"],
      "no such file; write gpu_target_config=FILE, or omit it for the published figures",
    )


ENTRY_POINT_RULES = (generation, hardware)
