"""A run with schedules of batch size and row length."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import build, config_of
from support.tiny_run import logged, start

from maxlite.errors import UserError
from maxlite.metrics.writers import read_rows
from maxlite.step.compile import compile_for_batches
from maxlite.training.program import StepKind, step_flops

SCHEDULES = {
  "batch_size_schedule": "[[0, 16], [3, 32]]",
  "sequence_length_schedule": "[[0, 8], [3, 16]]",
}


@pytest.mark.slow
def test_a_run_with_schedules_resumes_exactly_and_counts_its_tokens(folder):
  keys = SCHEDULES | {"decoder_block": "llama", "base_num_decoder_layers": 1}
  whole = folder / "whole"
  resumed = folder / "resumed"
  code, output = start(whole, **keys)
  assert code == 0
  rows = read_rows(whole / "run/metrics.jsonl")
  assert [row["num_tokens"] for row in rows] == [16 * 16] * 3 + [32 * 16] * 5
  assert "read of data: 208 rows, 3,328 tokens, " in output
  program = build(config_of(**keys))
  shapes = [(32, 8)] * 3 + [(32, 16)] * 5
  flops = [step_flops(program, StepKind(program.objectives[0], shape)) for shape in shapes]
  for row, expected in list(zip(rows, flops, strict=True))[1:]:
    counted = row["tflops_per_device"] * row["step_seconds"] * 8e12
    np.testing.assert_allclose(counted, expected, rtol=1e-6)
  shutil.copytree(whole, resumed)
  for step in (4, 6, 8):
    shutil.rmtree(resumed / f"run/checkpoints/{step}")
  code, output_resumed = start(resumed, **keys)
  assert (code, "resuming from the checkpoint of step 2" in output_resumed) == (0, True)
  assert logged(resumed) == logged(whole)
  assert output_resumed.splitlines()[-2] == output.splitlines()[-2]


def test_programs_are_compiled_for_the_given_shapes_only():
  traced = []
  step = jax.jit(lambda state, x: (state + jnp.sum(x), traced.append(x.shape)))

  def like(size):
    return jax.ShapeDtypeStruct((size,), np.float32)

  compiled = compile_for_batches(step, jax.ShapeDtypeStruct((), np.float32), [like(2), like(3)])
  assert traced == [(2,), (3,)]
  assert [compiled(np.float32(1), np.ones(size, np.float32))[0] for size in (3, 2, 3)] == [4, 3, 4]
  assert traced == [(2,), (3,)]
  with pytest.raises(KeyError):
    compiled(np.float32(1), np.ones(4, np.float32))


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"batch_size_schedule": "[[0, 16], [3, 20]]"}, "batch_size_schedule: 20 rows do not divide"),
    (
      {"sequence_length_schedule": "[[0, 1]]", "ici_context_parallelism": 2},
      "sequence_length_schedule=1 does not divide by the 2 shards",
    ),
  ],
)
def test_a_schedule_that_does_not_fit_the_mesh_is_one_line(keys, message):
  with pytest.raises(UserError, match=message):
    build(config_of(**keys))
