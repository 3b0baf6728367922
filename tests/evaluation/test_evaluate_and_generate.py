"""Evaluation of a run and generation with it."""

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from support.tiny import config_of, uneven_batch
from support.tiny_run import Output, keys_in, logged, shared_programs

import maxlite
import maxlite.evaluate
from maxlite.config import load_config
from maxlite.evaluation.held_out import compile_eval_step, evaluate
from maxlite.inference.generation import run_generation
from maxlite.metrics import waits
from maxlite.runs.evaluate_run import run_evaluation
from maxlite.runs.saved_run import config_of_run, main_run_config


def evaluated(folder, *overrides):
  """Output of `maxlite.evaluate` for the run in `folder`."""
  names = ("run_name", "base_output_directory", "jax_cache_dir")
  argv = [f"{name}={keys_in(folder)[name]}" for name in names] + list(overrides)
  output = Output()
  with contextlib.redirect_stdout(output), shared_programs():
    assert run_evaluation(config_of_run(argv)) == 0
  return output.getvalue()


def test_evaluation_equals_that_of_the_run(finished):
  folder, _ = finished
  first = evaluated(folder)
  last = logged(folder)[-1]
  assert f"step 8  eval_loss {last['eval_loss']:.6g}  " in first
  assert f"eval_ema_loss {last['eval_ema_loss']:.6g}" in first
  assert last["eval_ema_loss"] != last["eval_loss"]
  assert evaluated(folder) == first
  assert evaluated(folder, "eval_steps=-1") != first


def test_a_mesh_of_a_run_that_this_machine_has_not_is_replaced(copy, capsys):
  config = copy / "run" / "config.yml"
  text = config.read_text()
  assert "ici_data_parallelism: 1" in text
  config.write_text(text.replace("ici_data_parallelism: 1", "ici_data_parallelism: 16"))
  loss = evaluated(copy).partition("eval_loss ")[2].split()[0]
  assert float(loss) == pytest.approx(logged(copy)[-1]["eval_loss"], rel=1e-5)
  assert (
    "the mesh of the run, ici_data_parallelism=16 ici_fsdp_parallelism=-1, does not fit"
    in capsys.readouterr().err
  )
  with pytest.raises(SystemExit):  # one that is typed is not replaced
    evaluated(copy, "ici_data_parallelism=32")


@pytest.mark.slow
def test_eval_documents_writes_the_loss_of_each_document(copy):
  text = copy / "text.txt"
  text.write_text("to be or not to be\n" * 99)
  printed = evaluated(
    copy,
    "dataset_type=text",
    f"dataset_path={text}",
    "eval_split=tail",
    "eval_fraction=0.2",
    "eval_documents=true",
  ).splitlines()[-1]
  row = json.loads((copy / "run/eval_documents.jsonl").read_text())
  assert list(row)[:4] == ["document", "tokens", "bytes", "nll"]
  assert f"1 documents  tokens {row['tokens']}  bytes {row['bytes']}  nll" in printed
  assert row["nll"] != row["ema_nll"]


def test_synthetic_data_without_documents_exits_with_one_line(finished, capsys):
  argv = [f"base_output_directory={finished[0]}", "run_name=run", "eval_documents=true"]
  with pytest.raises(SystemExit, match="2"):
    run_evaluation(config_of_run(argv))
  assert "dataset_type=synthetic has no documents: set" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_found_before_the_evaluation(
  finished, monkeypatch, capsys
):
  argv = ["evaluate", f"base_output_directory={finished[0]}", "run_name=run", "eval_documents=true"]
  monkeypatch.setattr("sys.argv", argv)
  monkeypatch.setattr("os.access", lambda path, mode: False)
  with pytest.raises(SystemExit, match="2"):
    maxlite.evaluate.main()
  assert "cannot be written (no permission in" in capsys.readouterr().err


@pytest.mark.slow
def test_sums_over_many_batches_are_not_rounded(program_of):
  program = program_of(decoder_block="llama")
  params = program.init(0).params
  batch = uneven_batch(0)
  eval_step = compile_eval_step(program, np.ones(program.spec.model.vocab_size, np.int32))
  once = evaluate(program, eval_step, params, {"data": [batch]})
  often = evaluate(program, eval_step, params, {"data": [batch] * 99})
  assert often["eval_tokens"] == 99 * once["eval_tokens"] == 99 * np.sum(batch.weight_BT)
  for name in ("eval_loss", "eval_bits_per_byte"):
    np.testing.assert_allclose(often[name], once[name], rtol=1e-12)


def test_only_keys_on_the_command_line_change_the_config_of_a_run(finished, tmp_path):
  file = tmp_path / "other.yml"
  file.write_text(f"base_output_directory: {finished[0]}\nrun_name: run\neval_steps: 7\n")
  argv = [str(file), "decode_sampling_temperature=0.25", "prompt=not_a_file.yml"]
  cfg = load_config(argv, needs_data=False)
  assert cfg.observe.eval_steps == 7
  saved = config_of_run(argv)
  assert saved.observe.eval_steps == 2
  assert saved.generate.decode_sampling_temperature == 0.25
  assert saved.generate.prompt == "not_a_file.yml"
  assert saved.model == config_of(**keys_in(finished[0])).model


@pytest.mark.parametrize(
  ("override", "message"),
  [
    ("run_name=none", "there is no run"),
    ("num_experts=8", "was made with num_experts=4"),
    ("member=a", "has no member 'a': leave out member"),
  ],
)
def test_a_missing_run_or_another_model_exits_with_one_line(finished, capsys, override, message):
  argv = [f"base_output_directory={finished[0]}", "run_name=run", override]
  with pytest.raises(SystemExit, match="2"):
    main_run_config(argv, "maxlite.evaluate")
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("maxlite.evaluate: ")
  assert message in line


@pytest.fixture(scope="module")
def ensemble(finished, tmp_path_factory):
  """The folder of an ensemble whose members a and b are copies of a run."""
  folder = tmp_path_factory.mktemp("runs") / "both"
  for name in ("a", "b"):
    shutil.copytree(finished[0] / "run", folder / "members" / name)
  shutil.copyfile(finished[0] / "run/config.yml", folder / "config.yml")
  return folder


def test_a_member_of_an_ensemble_is_evaluated_as_a_solo_run(finished, ensemble):
  folder, _ = finished
  of_run = evaluated(folder).replace(f"{folder}/run", "")
  ensemble_keys = (f"base_output_directory={ensemble.parent}", "run_name=both")
  of_member = evaluated(folder, ensemble_keys[0], ensemble_keys[1], "member=b")
  assert of_member.replace(f"{ensemble}/members/b", "") == of_run


@pytest.mark.parametrize(
  ("member", "message"),
  [
    ("", "is an ensemble: set member=a|b"),
    ("c", "has no member 'c': set member=a|b"),
  ],
)
def test_an_ensemble_names_its_members(ensemble, capsys, member, message):
  argv = [f"base_output_directory={ensemble.parent}", "run_name=both", f"member={member}"]
  with pytest.raises(SystemExit, match="2"):
    main_run_config(argv, "maxlite.generate")
  assert message in capsys.readouterr().err
  with pytest.raises(ValueError, match=r"load a member, with member=best or member=a"):
    maxlite.load(ensemble)


def test_generation_needs_a_tokenizer(finished, capsys):
  argv = [f"base_output_directory={finished[0]}", "run_name=run"]
  with pytest.raises(SystemExit, match="2"):
    run_generation(config_of_run(argv))
  assert "has no tokenizer" in capsys.readouterr().err


def generation_error(finished, capsys, *overrides):
  """Error line of `maxlite.generate`, for a run declared to be on text."""
  argv = [f"base_output_directory={finished[0]}", "run_name=run", "dataset_type=text", *overrides]
  with pytest.raises(SystemExit, match="2"):
    run_generation(config_of_run(argv))
  (line,) = capsys.readouterr().err.splitlines()
  return line


@pytest.mark.slow
def test_reports_of_compilation_do_not_interrupt_a_completion(finished, monkeypatch):
  monkeypatch.setattr(waits, "FIRST_SECONDS", 0.01)
  argv = [f"base_output_directory={finished[0]}", "run_name=run", "dataset_type=text"]
  terminal = io.StringIO()
  with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
    run_generation(config_of_run([*argv, "prompt=def ", "max_new_tokens=4"]))
  reports, _, text = terminal.getvalue().partition("def ")
  assert "compiling a decode step" in reports
  assert "compiling" not in text


@pytest.mark.parametrize(
  ("override", "message"),
  [
    ("prompt_file=none.jsonl", "prompt_file=none.jsonl is not a file"),
    ("prompt_file=none.yml", "prompt_file=none.yml is not a file"),
    ("num_speculative_tokens=1", "exceeds num_draft_heads=0"),
    ("return_expert_ids=true", "for JSON lines: write prompt_file=FILE"),
    ("max_new_tokens=99", "max_target_length=16, the longest sequence in training"),
  ],
)
def test_invalid_generation_settings_exit_with_one_line(finished, capsys, override, message):
  assert message in generation_error(finished, capsys, override)


def test_prompt_files_are_validated_line_by_line(finished, capsys, tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  file = tmp_path / "prompts.jsonl"
  for content, message in (
    ("", "has no lines"),
    ('{"prompt": "a"}\n\n{"text": "b"}', "prompts.jsonl:3: write"),
    ("[", "prompts.jsonl:1: not JSON"),
    ('{"prompt": 7}', "prompts.jsonl:1: write"),
    ('{"prompt": "a", "messages": []}', "prompts.jsonl:1: write"),
    ('{"messages": []}', "prompts.jsonl:1: messages must be a list"),
    ('{"messages": [{"role": 1}]}', "prompts.jsonl:1: messages: the 1. must be"),
  ):
    file.write_text(content)
    assert message in generation_error(finished, capsys, "prompt_file=~/prompts.jsonl")


ROOT = Path(__file__).resolve().parents[2]
CHAT = ["use_chat_template=true", f"chat_template_path={ROOT}/configs/chat/plain.jinja"]
GREEDY = ["decode_sampling_temperature=0", "max_new_tokens=5", "max_target_length=128"]


def chat(finished, capsys, monkeypatch, lines, *overrides):
  """What `maxlite.generate` answers to the lines of a terminal."""
  argv = [f"base_output_directory={finished[0]}", "run_name=run", "dataset_type=text", "prompt="]
  monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
  capsys.readouterr()
  assert run_generation(config_of_run([*argv, *CHAT, *GREEDY, *overrides])) == 0
  return capsys.readouterr().out


@pytest.mark.slow
def test_a_chat_of_several_turns_continues_the_conversation(
  finished, capsys, monkeypatch, tmp_path
):
  output = chat(finished, capsys, monkeypatch, ["hi", "", "and you?"])
  first = chat(finished, capsys, monkeypatch, ["hi"]).removesuffix("\n")
  assert output.startswith(f"{first}\n")
  messages = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": first},
    {"role": "user", "content": "and you?"},
  ]
  file = tmp_path / "prompts.jsonl"
  lines = [json.dumps({"messages": messages[:1]}), json.dumps({"messages": messages})]
  file.write_text("\n".join(lines))
  rows = chat(finished, capsys, monkeypatch, [], f"prompt_file={file}").splitlines()
  answers = [json.loads(row) for row in rows]
  assert [answer["messages"] for answer in answers] == [messages[:1], messages]
  assert output == "".join(f"{answer['text']}\n" for answer in answers)
  one = chat(finished, capsys, monkeypatch, [], "prompt=hi")
  assert one == f"{first}\n"  # without the prompt


@pytest.mark.slow
def test_json_lines_have_the_experts_of_every_token(finished, capsys, tmp_path):
  file = tmp_path / "prompts.jsonl"
  file.write_text('{"prompt": "abc"}\n{"prompt": "de"}')
  argv = [f"base_output_directory={finished[0]}", "run_name=run", "dataset_type=text"]
  keys = [f"prompt_file={file}", "max_new_tokens=1", "return_expert_ids=true", "add_bos=false"]
  capsys.readouterr()
  assert run_generation(config_of_run([*argv, *keys])) == 0
  rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [np.shape(row["expert_ids"]) for row in rows] == [(3, 1, 2), (2, 1, 2)]


def test_a_chat_needs_a_template(finished, capsys):
  line = generation_error(finished, capsys, "use_chat_template=true", "prompt=hi")
  assert "set chat_template_path" in line
