"""Scenarios of the official Tinker client, one per process; prints a JSON object as its last line.

python official_client.py SCENARIO ARGUMENTS...
"""

import json
import sys
import threading

import tinker
from tinker import types

TEXT = list(b"the cat sat on the mat, the dog sat on the log")


def datum(tokens, **inputs):
  given = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
  given = given | inputs if "logprobs" not in inputs else {"target_tokens": tokens[1:], **inputs}
  return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def log_probs_of(training, tokens):
  (output,) = training.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs
  return list(output["logprobs"].data)


def step(training, data, loss="cross_entropy", learning_rate=1e-2, **config):
  """Loss and norm of a step; both requests are sent before the first result."""
  forward = training.forward_backward(data, loss, config or None)
  update = training.optim_step(types.AdamParams(learning_rate=learning_rate, eps=1e-8))
  return [forward.result().metrics["loss:sum"], update.result().metrics["grad_norm"]]


def open_model(service, rank=4, seed=1, **config):
  return service.create_lora_training_client("base", rank=rank, seed=seed, **config).result()


def supervised(service, seed="1", steps="6"):
  """Losses, and the log-probabilities after them."""
  training = open_model(service, rank=1 + int(seed) % 8, seed=int(seed))
  data = [datum(TEXT[n : n + 20]) for n in range(0, 20, 5)]
  rows = []
  for _ in range(int(steps)):
    rows.append(step(training, data))
    print(f"step {len(rows)}", flush=True)
  return {"rows": rows, "log_probs": log_probs_of(training, TEXT[:20])}


def policy(service):
  """Samples of snapshots, their log-probabilities, and steps of all losses of policies."""
  training = open_model(service, rank=8)
  prompt = TEXT[:6]
  result = {"rows": [], "kl": []}
  first = training.save_weights_and_get_sampling_client()
  first = first.result() if hasattr(first, "result") else first
  first_before = first.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
  losses = ["importance_sampling", "ppo", "cispo", "dro"]
  for loss in losses:
    sampling = training.save_weights_and_get_sampling_client()
    sampling = sampling.result() if hasattr(sampling, "result") else sampling
    params = types.SamplingParams(max_tokens=10, temperature=1.0)
    futures = [
      sampling.sample(types.ModelInput.from_ints(prompt), num_samples=2, sampling_params=params)
      for _ in range(3)
    ]
    sequences = [each for future in futures for each in future.result().sequences]
    data = []
    for sequence in sequences:
      whole = prompt + list(sequence.tokens)
      reward = sum(token == ord("t") for token in sequence.tokens)
      zeros = [0.0] * (len(prompt) - 1)
      advantages = zeros + [reward - 1.0] * len(sequence.tokens)
      logprobs = zeros + list(sequence.logprobs)
      data.append(datum(whole, logprobs=logprobs, advantages=advantages))
      result["kl"].append(
        log_probs_of(training, whole)[len(prompt) - 1 :] == list(sequence.logprobs)
      )
    config = {"clip_low_threshold": 0.9} if loss == "ppo" else {}
    result["rows"].append(step(training, data, loss, **config))
  first_after = first.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
  result["snapshot"] = first_before == first_after
  result["moved"] = first_after[1:] != log_probs_of(training, TEXT)
  return result


def sampling(service):
  """Stops, seeds, greedy samples, log-probabilities of prompts."""
  base = service.create_sampling_client(base_model="base")
  base = base.result() if hasattr(base, "result") else base
  prompt = types.ModelInput.from_ints(TEXT[:5])

  def sample(num_samples=1, **params):
    answer = base.sample(
      prompt, num_samples=num_samples, sampling_params=types.SamplingParams(**params)
    )
    return [list(each.tokens) for each in answer.result().sequences]

  (greedy,) = sample(max_tokens=12, temperature=0.0)
  (stopped,) = sample(max_tokens=12, temperature=0.0, stop=[greedy[3]])
  text = bytes(token for token in greedy[4:6] if token < 256).decode("latin1")
  same = [sample(3, max_tokens=8, seed=11) for _ in range(2)]
  return {
    "greedy_repeats": sample(max_tokens=12, temperature=0.0) == [greedy],
    "stopped": stopped == greedy[: greedy.index(greedy[3]) + 1],
    "same_seed": same[0] == same[1],
    "samples_differ": len({tuple(each) for each in same[0]}) == 3,
    "first_is_none": base.compute_logprobs(prompt).result()[0] is None,
    "text": text,
  }


def custom(service):
  """A loss of the client's own equals the server's: the same gradient, and a step of it."""
  own, given = open_model(service, seed=3), open_model(service, seed=3)
  data = [datum(TEXT[:20]), datum(TEXT[5:30])]

  def negative_sum(data, log_probs):
    return -sum(each.sum() for each in log_probs), {"count": float(len(log_probs))}

  update = types.AdamParams(learning_rate=1e-2, eps=1e-8)
  future = own.forward_backward_custom(data, negative_sum)
  future = future.result() if hasattr(future, "result") else future
  norms = [own.optim_step(update).result().metrics, step(given, data)[1]]
  return {
    "norms": [norms[0]["grad_norm"], norms[1]],
    "metrics": future.metrics,
    "equal": log_probs_of(own, TEXT) == log_probs_of(given, TEXT),
  }


def resume(service):
  """A model of a checkpoint goes on as the model itself does."""
  data = [datum(TEXT[:20]), datum(TEXT[5:30])]
  training = open_model(service)
  for _ in range(2):
    step(training, data)
  path = training.save_state("middle").result().path
  want = [step(training, data) for _ in range(2)]
  again = service.create_training_client_from_state_with_optimizer(path)
  again = again.result() if hasattr(again, "result") else again
  fresh = service.create_training_client_from_state(path)
  fresh = fresh.result() if hasattr(fresh, "result") else fresh
  return {
    "with_optimizer": [step(again, data) for _ in range(2)] == want,
    "without": [step(fresh, data) for _ in range(2)] == want,
  }


def several(service, number="4"):
  """Clients in threads of one process, each with its own session."""
  results = {}

  def run(seed):
    with tinker.ServiceClient() as own:
      results[seed] = supervised(own, str(seed), "4")

  threads = [threading.Thread(target=run, args=(seed,)) for seed in range(int(number))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  alone = {seed: supervised(service, str(seed), "4") for seed in range(int(number))}
  return {"equal": results == alone}


def train_and_sample(service, seed):
  """Losses, and tokens and log-probabilities of samples of a snapshot after each of two steps."""
  training = open_model(service, rank=1 + seed % 8, seed=seed)
  rows = []
  for n in range(2):
    start = (seed + 5 * n) % 20
    loss = step(training, [datum(TEXT[start : start + 20]), datum(TEXT[n : n + 15])])
    snapshot = training.save_weights_and_get_sampling_client()
    snapshot = snapshot.result() if hasattr(snapshot, "result") else snapshot
    prompt = types.ModelInput.from_ints(TEXT[: 3 + seed % 5])
    params = types.SamplingParams(max_tokens=6, seed=seed)
    answer = snapshot.sample(prompt, num_samples=2, sampling_params=params).result()
    sequences = [[list(each.tokens), list(each.logprobs)] for each in answer.sequences]
    rows.append([loss, sequences])
  return rows


def crowd(service, number="32"):
  """Clients at once, each with its session and adapter, and then one after the other."""
  results = {}

  def run(seed):
    with tinker.ServiceClient() as own:
      results[seed] = train_and_sample(own, seed)

  seeds = range(int(number))
  threads = [threading.Thread(target=run, args=(seed,)) for seed in seeds]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  alone = {seed: train_and_sample(service, seed) for seed in seeds}
  texts = {str(rows) for rows in results.values()}
  return {
    "clients": len(results),
    "different": len(texts),
    "equal": sum(results.get(seed) == alone[seed] for seed in seeds),
  }


def failures(service):
  """Mistakes fail their own future with a line, and the client goes on."""
  training = open_model(service)
  messages = []

  def failing(call):
    try:
      call()
      messages.append("")
    except Exception as error:
      messages.append(f"{type(error).__name__}: {error}")

  failing(lambda: training.forward_backward([datum(TEXT[:9])], "stable_reinforce").result())
  failing(lambda: training.optim_step(types.AdamParams()).result())
  failing(lambda: training.forward_backward([datum([1, 300, 2])], "cross_entropy").result())
  failing(lambda: training.optim_step(types.AdamParams()).result())
  nan = datum(TEXT[:9], weights=[float("nan")] * 8)
  training.forward_backward([nan], "cross_entropy").result()
  failing(lambda: training.optim_step(types.AdamParams()).result())
  failing(lambda: open_model(service, rank=99).get_info())
  return {"messages": messages, "after": step(training, [datum(TEXT[:9])])}


def main():
  scenario, *arguments = sys.argv[1:]
  with tinker.ServiceClient() as service:
    result = globals()[scenario](service, *arguments)
  print(json.dumps(result))


if __name__ == "__main__":
  main()
