"""Scores and completions that `lm_eval` receives equal those of plain forward passes."""

import json

import jax
import numpy as np
import pytest
from support.tiny import LENGTH

import maxlite

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `lm_eval`")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from maxlite.lm_eval_adapter import MaxliteLM  # noqa: E402

BOS = 256
EOS = 257
PAIRS = [
  ("to be or", " not"),
  ("", "to be"),  # after bos only
  ("a ", "b"),  # a trailing space moves to the continuation
  ("to be or not to be, that is the question", "?"),  # longer than max_length
  ("x", "abcdefghijklmno"),  # the longest continuation
]


@pytest.fixture(scope="module")
def lm(finished):
  return MaxliteLM(str(finished[0] / "run"), batch_size=3, max_gen_toks=4)


@pytest.fixture(scope="module")
def log_probs(finished):
  """Function from at most LENGTH ids to log_p_TV, by a forward pass over one row."""
  model, params = maxlite.load(finished[0] / "run")

  @jax.jit
  def forward(tokens_1T):
    (logits_TV,) = model.apply(params, tokens_1T)
    return jax.nn.log_softmax(logits_TV)

  def log_probs_of(ids):
    tokens_1T = np.zeros((1, LENGTH), np.int32)
    tokens_1T[0, : len(ids)] = ids
    return np.asarray(forward(tokens_1T))

  return log_probs_of


def requests(kind, arguments):
  return [Instance(kind, {}, args, n) for n, args in enumerate(arguments)]


def expected(log_probs, context, continuation):
  """(log-likelihood, whether each token is the argmax) of a continuation."""
  ids = [BOS, *(context + continuation).encode()]
  num_scored = len(continuation.encode())
  inputs = ids[:-1][-LENGTH:]
  targets = ids[-num_scored:]
  first_scored = len(inputs) - num_scored
  log_p_TV = log_probs(inputs)[first_scored : len(inputs)]
  total = log_p_TV[np.arange(num_scored), targets].sum()
  is_greedy = np.array_equal(log_p_TV.argmax(-1), targets)
  return total, is_greedy


def test_log_likelihoods_equal_those_of_a_forward_pass(lm, log_probs):
  found = lm.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
  for (context, continuation), (score, is_greedy) in zip(PAIRS, found, strict=True):
    stripped = context.rstrip(" ")
    moved = context.removeprefix(stripped)  # to the continuation
    want_score, want_greedy = expected(log_probs, stripped, moved + continuation)
    np.testing.assert_allclose(score, want_score, rtol=1e-5)
    assert is_greedy == want_greedy


def test_greedy_continuations_are_recognized(lm, log_probs):
  context = [BOS, *b"ab"]
  argmax = int(log_probs(context)[2].argmax())
  other = (argmax + 1) % 256
  found = lm._loglikelihood_tokens([(None, context, [argmax]), (None, context, [other])])
  assert [is_greedy for _, is_greedy in found] == [True, False]


def test_a_continuation_longer_than_max_length_raises(lm):
  with pytest.raises(ValueError, match="a continuation of 17 tokens exceeds max_length"):
    lm.loglikelihood(requests("loglikelihood", [("a", "b" * 17)]), disable_tqdm=True)


def rolling(log_probs, text):
  """Log-likelihood of all bytes in windows of LENGTH; the last is filled up on the left."""
  ids = [BOS, *text.encode()]
  total = 0.0
  for done in range(0, len(ids) - 1, LENGTH):
    stop = min(done + LENGTH, len(ids) - 1)
    begin = max(stop - LENGTH, 0)
    log_p_TV = log_probs(ids[begin:stop])
    total += sum(log_p_TV[t - begin, ids[t + 1]] for t in range(done, stop))
  return total


def test_long_strings_are_scored_in_rolling_windows(lm, log_probs):
  texts = ["to be", "to be or not to be", "x" * 2 * LENGTH, ""]
  asked = requests("loglikelihood_rolling", [(text,) for text in texts])
  found = lm.loglikelihood_rolling(asked)
  expected = [rolling(log_probs, text) for text in texts]
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_completions_end_at_their_stop_strings(lm, log_probs):
  ids = [BOS, *b"to be"]
  while len(ids) < 10:
    ids.append(int(log_probs(ids)[len(ids) - 1].argmax()))
  completion = lm._tokenizer.decode(ids[6:])
  stop = completion[2]
  asked = [("to be", {"until": []}), ("to be", {"until": [stop], "max_gen_toks": 3})]
  texts = lm.generate_until(requests("generate_until", asked))
  assert texts == [completion, completion[: completion.index(stop)]]
  with pytest.raises(ValueError, match="generation_kwargs has num_beams; supported are"):
    lm.generate_until(requests("generate_until", [("a", {"num_beams": 2})]))
  with pytest.raises(ValueError, match="max_gen_toks=16 leaves no room"):
    lm.generate_until(requests("generate_until", [("a", {"max_gen_toks": 16})]))


CHOICES = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_target: label
doc_to_choice: "{{{{choices}}}}"
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""
TEXTS = """
task: tiny_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


@pytest.mark.filterwarnings("ignore")  # of its dependencies
def test_tasks_of_local_files_are_evaluated(lm, log_probs, tmp_path, monkeypatch):
  monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
  rows = [
    {"text": "to be", "choices": ["or", "zz"], "label": 0},
    {"text": "to be", "choices": ["or", "zz"], "label": 1},
    {"text": "to be", "choices": ["or", "zz"], "label": 0},
    {"text": "or not", "choices": ["to", "qq"], "label": 0},
  ]
  file = tmp_path / "rows.jsonl"
  lines = [json.dumps(row) for row in rows]
  file.write_text("\n".join(lines) + "\n")
  for name, task in (("choices", CHOICES), ("texts", TEXTS)):
    (tmp_path / f"{name}.yaml").write_text(task.format(file=file))
  results = lm_eval.simple_evaluate(
    model=lm,
    tasks=["tiny_choices", "tiny_texts"],
    task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    bootstrap_iters=0,
  )["results"]
  num_right = 0
  for row in rows:
    scores = []
    for choice in row["choices"]:
      score, _ = expected(log_probs, row["text"], f" {choice}")
      scores.append(score)
    num_right += np.argmax(scores) == row["label"]
  assert results["tiny_choices"]["acc,none"] == num_right / len(rows)
  nats = sum(rolling(log_probs, row["text"]) for row in rows)
  num_bytes = sum(len(row["text"]) for row in rows)
  bits = results["tiny_texts"]["bits_per_byte,none"]
  np.testing.assert_allclose(bits, -nats / num_bytes / np.log(2), rtol=1e-5)
