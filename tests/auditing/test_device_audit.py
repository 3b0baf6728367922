"""audit_devices=all: gradients on the devices of the machine, here simulated ones."""

import os
import subprocess
import sys

import pytest
from support.faulty_device import WrongDevice
from support.tiny import config_of

from maxlite.auditing.device_audit import audit_on_devices, without_features
from maxlite.auditing.variants import AXES, Variant
from maxlite.registry import FEATURES, FeatureEntry
from maxlite.training.spec import spec_of

pytestmark = pytest.mark.usefixtures("fast_programs")
ON_TWO = Variant(tuple(2 if axis == "data" else 1 for axis in AXES))


def outcomes_of(**keys):
  spec, _ = without_features(spec_of(config_of(**keys)))
  return list(audit_on_devices(spec, [Variant(), ON_TWO]))


def test_a_right_step_is_within_rounding():
  alone, divided = outcomes_of(decoder_block="llama", dtype="bfloat16")
  assert not alone.problem
  assert not divided.problem
  assert 1e-4 < alone.gradients < 0.2  # rounding of bfloat16
  assert alone.is_repeatable


@pytest.mark.slow
def test_float32_and_experts_are_within_rounding():
  for outcome in outcomes_of(decoder_block="mixtral", sparse_matmul=True):
    assert not outcome.problem
    assert outcome.gradients < 1e-4


def test_a_device_that_computes_wrong_values_is_found():
  FEATURES["wrong"] = FeatureEntry(lambda request: WrongDevice())
  try:
    alone, divided = outcomes_of(decoder_block="llama", dtype="bfloat16")
  finally:
    del FEATURES["wrong"]
  assert not alone.problem
  assert divided.problem.startswith(f"the gradient of {divided.worst} is ")
  assert divided.gradients > divided.limit


@pytest.mark.slow
def test_the_command_audits_all_devices_in_all_ways(tmp_path):
  keys = ["base_emb_dim=32", "base_num_decoder_layers=1", "max_target_length=32"]
  command = [sys.executable, "-m", "maxlite.audit", "configs/base.yml", "audit_devices=all", *keys]
  done = subprocess.run(
    [*command, f"audit_json={tmp_path}/audit.json"],
    capture_output=True,
    text=True,
    check=False,
    timeout=500,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""},
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "8 of 8 variants on 2 x cpu equal the reference up to rounding" in done.stdout
