"""Scores and completions that `lm_eval` receives equal those of plain forward passes."""

import json

import jax
import numpy as np
import pytest
from tiny import LENGTH

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
  forward = jax.jit(lambda tokens_BT: jax.nn.log_softmax(model.apply(params, tokens_BT)[0]))

  def pad(ids):
    return np.array([[*ids, *[0] * (LENGTH - len(ids))]], np.int32)

  return lambda ids: np.asarray(forward(pad(ids)))


def requests(kind, arguments):
  return [Instance(kind, {}, args, n) for n, args in enumerate(arguments)]


def expected(log_probs, context, continuation):
  """(log-likelihood, whether each token is the argmax) of a continuation."""
  ids = [BOS, *(context + continuation).encode()]
  num_scored = len(continuation.encode())
  inputs = ids[:-1][-LENGTH:]
  log_p_TV = log_probs(inputs)[: len(inputs)][-num_scored:]
  targets = ids[-num_scored:]
  total = log_p_TV[np.arange(num_scored), targets].sum()
  return total, bool((log_p_TV.argmax(-1) == targets).all())


def test_log_likelihoods_equal_those_of_a_forward_pass(lm, log_probs):
  found = lm.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
  for (context, continuation), (score, is_greedy) in zip(PAIRS, found, strict=True):
    space = " " if context.endswith(" ") else ""
    want = expected(log_probs, context.rstrip(" "), space + continuation)
    np.testing.assert_allclose(score, want[0], rtol=1e-5)
    assert is_greedy == want[1]


def test_greedy_continuations_are_recognized(lm, log_probs):
  argmax = int(log_probs([BOS, *b"ab"])[2].argmax())
  (_, yes), (_, no) = lm._loglikelihood_tokens(
    [(None, [BOS, *b"ab"], [token]) for token in (argmax, (argmax + 1) % 256)]
  )
  assert (yes, no) == (True, False)


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
  found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in texts]))
  np.testing.assert_allclose(found, [rolling(log_probs, text) for text in texts], rtol=1e-5)


def test_completions_end_at_their_stop_strings(lm, log_probs):
  ids = [BOS, *b"to be"]
  while len(ids) < 10:
    ids.append(int(log_probs(ids)[len(ids) - 1].argmax()))
  completion = lm._tokenizer.decode(ids[6:])
  asked = [("to be", {"until": []}), ("to be", {"until": [completion[2]], "max_gen_toks": 3})]
  texts = lm.generate_until(requests("generate_until", asked))
  assert texts == [completion, completion[: completion.index(completion[2])]]
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
  rows = [{"text": "to be", "choices": ["or", "zz"], "label": n % 2} for n in range(3)] + [
    {"text": "or not", "choices": ["to", "qq"], "label": 0}
  ]
  file = tmp_path / "rows.jsonl"
  file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  for name, task in (("choices", CHOICES), ("texts", TEXTS)):
    (tmp_path / f"{name}.yaml").write_text(task.format(file=file))
  results = lm_eval.simple_evaluate(
    model=lm,
    tasks=["tiny_choices", "tiny_texts"],
    task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    bootstrap_iters=0,
  )["results"]
  right = [
    np.argmax([expected(log_probs, row["text"], f" {choice}")[0] for choice in row["choices"]])
    == row["label"]
    for row in rows
  ]
  assert results["tiny_choices"]["acc,none"] == np.mean(right)
  nats = sum(rolling(log_probs, row["text"]) for row in rows)
  num_bytes = sum(len(row["text"]) for row in rows)
  bits = results["tiny_texts"]["bits_per_byte,none"]
  np.testing.assert_allclose(bits, -nats / num_bytes / np.log(2), rtol=1e-5)
