"""What a run traces and compiles before its first step."""

import threading

import jax
from flax import linen as nn
from support.tiny import build, config_of, place, uneven_batch

from maxlite.models import Decoder


def test_the_model_of_one_device_is_traced_once_for_its_shapes_and_its_values():
  calls = []

  def count(call, args, kwargs, context):
    if isinstance(context.module, Decoder):
      calls.append(context.method_name)
    return call(*args, **kwargs)

  with nn.intercept_methods(count):
    program = build(config_of(per_device_batch_size=16), jax.devices()[:1])
    program.init(0)
  assert calls.count("hidden_and_unembedding") == 1


def test_the_step_is_compiled_once_in_a_thread():
  threads = []

  def listen(event, _seconds, *, fun_name="", **_others):
    if "backend_compile" in event and fun_name == "jit(train_step)":
      threads.append(threading.current_thread())

  program = build(config_of(decoder_block="llama", base_num_decoder_layers=1))
  batch = place(program, uneven_batch(0))
  state = program.init(0)
  jax.monitoring.register_event_duration_secs_listener(listen)
  program.compile()
  program.step(state, batch)
  jax.monitoring.unregister_event_duration_listener(listen)
  (compiling,) = threads
  assert compiling is not threading.main_thread()
