"""A trained run, evaluated and made to write."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import config_of, trainer_of, uneven_batch
from tiny_run import Output, keys_in, logged

from maxlite.config import load_config
from maxlite.training.evaluate import evaluate
from maxlite.training.inference import config_of_run, generate, run_evaluation, run_generation

PROMPT = [5, 17, 3]


def evaluated(folder, *words):
  """What `maxlite.evaluate` prints for the run in `folder`."""
  names = ("run_name", "base_output_directory", "jax_cache_dir")
  argv = [f"{name}={keys_in(folder)[name]}" for name in names] + list(words)
  output = Output()
  with contextlib.redirect_stdout(output):
    assert run_evaluation(load_config(argv, needs_data=False), argv) == 0
  return output.getvalue()


def test_an_evaluation_is_that_of_the_run_every_time(finished):
  folder, _ = finished
  first = evaluated(folder)
  last = logged(folder)[-1]
  assert f"step 8  eval_loss {last['eval_loss']:.6g}  " in first
  assert f"eval_ema_loss {last['eval_ema_loss']:.6g}" in first
  assert last["eval_ema_loss"] != last["eval_loss"]
  assert evaluated(folder) == first
  assert evaluated(folder, "eval_steps=-1") != first


def test_many_batches_are_added_up_without_rounding():
  trainer, batch = trainer_of(decoder_block="llama"), uneven_batch(0)
  eval_step = trainer.eval_step(np.ones(trainer.cfg.model.vocab_size, np.int32))
  once, often = (evaluate(trainer, eval_step, init_params(), [batch] * n) for n in (1, 99))
  assert often["eval_tokens"] == 99 * once["eval_tokens"] == 99 * np.sum(batch.weight_BT)
  for name in ("eval_loss", "eval_bits_per_byte"):
    np.testing.assert_allclose(often[name], once[name], rtol=1e-12)


def test_only_typed_keys_change_the_config_of_a_run(finished, tmp_path):
  file = tmp_path / "other.yml"
  file.write_text(f"base_output_directory: {finished[0]}\nrun_name: run\neval_steps: 7\n")
  argv = [str(file), "temperature=0.25"]
  cfg = load_config(argv, needs_data=False)
  assert cfg.observe.eval_steps == 7
  saved = config_of_run(cfg, argv)
  assert (saved.observe.eval_steps, saved.generate.temperature) == (2, 0.25)
  assert saved.model == config_of(**keys_in(finished[0])).model


@pytest.mark.parametrize(
  ("word", "message"),
  [("run_name=none", "there is no run"), ("num_experts=8", "was made with num_experts=4")],
)
def test_another_run_or_model_is_one_line(finished, capsys, word, message):
  argv = [f"base_output_directory={finished[0]}", "run_name=run", word]
  with pytest.raises(SystemExit, match="2"):
    run_evaluation(load_config(argv, needs_data=False), argv)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("maxlite.evaluate: ")
  assert message in line


def test_synthetic_data_has_no_text_to_generate(finished, capsys):
  argv = [f"base_output_directory={finished[0]}", "run_name=run"]
  with pytest.raises(SystemExit, match="2"):
    run_generation(load_config(argv, needs_data=False), argv)
  assert "has no tokenizer" in capsys.readouterr().err


def generated(eos=-1, **keys):
  """(trainer, parameters, 20 tokens after PROMPT): more than one row holds."""
  trainer = trainer_of(decoder_block="llama", max_new_tokens=20, **keys)
  params = init_params()
  return trainer, params, list(generate(trainer, params, PROMPT, eos))


def init_params():
  params = trainer_of(decoder_block="llama").init_state().params
  # Larger than at the start of training, so that the choice depends on what came before.
  return params | {"unembed": jax.tree.map(lambda w: 5 * w, params["unembed"])}


def test_greedy_tokens_are_the_likeliest_after_the_newest_that_fit():
  trainer, params, tokens = generated(temperature=0)
  length = trainer.cfg.data.max_target_length
  logits_of = jax.jit(trainer.model.apply)
  text = PROMPT + tokens
  for n in range(len(PROMPT), len(text)):
    seen = text[max(n - length, 0) : n]
    tokens_BT = np.zeros((trainer.global_batch_size, length), np.int32)
    tokens_BT[:, : len(seen)] = seen
    logits_BTV = logits_of({"params": params}, jnp.asarray(tokens_BT))
    assert text[n] == np.argmax(logits_BTV[0, len(seen) - 1])
  assert len(tokens) == 20 > len(set(tokens)) > 3


def test_generation_ends_before_the_end_of_text():
  tokens = generated(temperature=0)[-1]
  eos = tokens[10]
  expected = list(itertools.takewhile(lambda token: token != eos, tokens))
  assert generated(eos, temperature=0)[-1] == expected


def test_sampling_follows_its_seed():
  first = generated(temperature=1.0)[-1]
  assert generated(temperature=1.0)[-1] == first
  assert generated(temperature=1.0, decode_sampling_seed=1)[-1] != first
