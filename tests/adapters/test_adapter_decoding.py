"""Rows of different adapters are decoded together, each as if it were alone."""

import jax
import numpy as np
import pytest
from support.tiny_adapters import MIXTURE, engine_of

from maxlite.adapters.decoding import AdapterDecoder, AdapterRequest
from maxlite.adapters.engine import AdapterSpec
from maxlite.inference.batcher import Batcher
from maxlite.inference.sampling import SamplingParams
from maxlite.models import Decoder

pytestmark = pytest.mark.usefixtures("fast_programs")
PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18])


def states_of(engine):
  """Three adapters that differ from their base."""
  states = []
  for seed in range(3):
    state = engine.new_adapter(AdapterSpec(rank=seed + 1, seed=seed))
    rng = np.random.default_rng(seed)
    factors = {
      path: leaf + np.float32(rng.normal(size=leaf.shape) / 4)
      for path, leaf in state.factors.items()
    }
    states.append(state.replace(factors=factors))
  return states


@pytest.fixture(scope="module")
def dense():
  engine = engine_of(1)
  return engine, AdapterDecoder(engine, num_rows=4), states_of(engine)


def requests_of(decoder, states):
  """Requests of all adapters, more than rows, that end after different numbers of tokens."""
  requests = []
  for n, state in enumerate(states):
    factors = decoder.factors(state)
    for m, prompt in enumerate(PROMPTS):
      sampling = SamplingParams(temperature=m / 2)
      requests.append(AdapterRequest(prompt, 3 + 5 * ((n + m) % 3), sampling, 10 * n + m, factors))
  return requests


def complete(decoder, requests):
  """The tokens of requests that share the decoder."""
  batcher = Batcher(decoder)
  waiting = list(requests)
  tokens = {request: [] for request in requests}
  while waiting or not batcher.is_idle:
    new, waiting = waiting[: batcher.num_free], waiting[batcher.num_free :]
    events = batcher.add(new)
    if not batcher.is_idle:
      events += batcher.step()
    for event in events:
      tokens[event.request].append(event.token)
  return list(tokens.values())


def check_rows(decoder, states):
  requests = requests_of(decoder, states)
  alone = [complete(decoder, [request])[0] for request in requests]
  assert [len(each) for each in alone] == [request.max_new_tokens for request in requests]
  order = np.random.default_rng(1).permutation(len(requests))
  together = complete(decoder, [requests[n] for n in order])
  assert together == [alone[n] for n in order]
  assert len({tuple(each[:3]) for each in alone[::3]}) == 3, "adapters do not differ"


def test_completions_do_not_depend_on_the_adapters_of_other_rows(dense):
  _, decoder, states = dense
  check_rows(decoder, states)


@pytest.mark.slow
def test_completions_of_a_mixture_of_experts_do_not_depend_on_other_rows():
  engine = engine_of(1, **MIXTURE)
  check_rows(AdapterDecoder(engine, num_rows=2), states_of(engine))


@pytest.mark.slow
def test_neither_do_those_of_layers_that_are_not_scanned_with_a_soft_cap():
  engine = engine_of(1, scan_layers=False, final_logits_soft_cap=3.0, logits_scaling=2.0)
  states = states_of(engine)
  decoder = AdapterDecoder(engine, num_rows=2)
  check_rows(decoder, states)
  check_greedy(engine, decoder, states[1])


def check_greedy(engine, decoder, state):
  prompt = PROMPTS[0]
  greedy = SamplingParams(temperature=0.0)
  request = AdapterRequest(prompt, 8, greedy, 0, decoder.factors(state))
  (tokens,) = complete(decoder, [request])
  params = engine.merged(state)
  model = Decoder(engine.base_cfg, engine.sharder)
  whole = np.asarray([*prompt, *tokens])
  logits = jax.jit(model.apply)({"params": params}, whole[None])[0]
  want = np.argmax(logits, axis=-1)[len(prompt) - 1 : -1]
  np.testing.assert_array_equal(tokens, want)


def test_greedy_completions_are_those_of_the_merged_model(dense):
  engine, decoder, states = dense
  for state in states:
    check_greedy(engine, decoder, state)


def test_adapters_join_without_compiling(dense):
  from support.tiny import compilations

  engine, decoder, states = dense
  complete(decoder, requests_of(decoder, states))
  with compilations() as compiled:
    complete(decoder, requests_of(decoder, [engine.empty(), *states[:2]]))
  assert compiled == []
