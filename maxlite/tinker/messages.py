"""The messages of the Tinker client that are protocol buffers, by the numbers of their fields.

ForwardBackwardRequest: model_id 1, seq_id 2, data 3 (Datum), loss_fn 4, loss_fn_config 5
(map to double), forward_only 6, loss_fn_config_v2 7 (map to {number 1, text 2}).
Datum: model_input 1 (Chunk {encoded_text 1 {tokens 1}, image 2, audio 3}), loss_fn_inputs 2 (map to
Tensor). Tensor: dense 1, sparse_csr 2 {values 1, crow_indices 2, col_indices 3}, dtype 3, shape 4.
ForwardBackwardOutput: loss_fn_output_type 1, loss_fn_outputs 2 (ArrayRecord {type_tag 1, fields 2
(map to BatchedTensor {data 1, offsets 2, dtype 3, trailing_shape 4}), num_datums 3}), metrics 3.
SampleResponse: sequences 1 {stop_reason 1, tokens 2, logprobs 3}, prompt_logprobs 2.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxlite.adapters.datum import Datum
from maxlite.adapters.engine import RowResult
from maxlite.errors import UserError
from maxlite.tinker.wire import (
  Value,
  WireError,
  as_bytes,
  as_double,
  as_entry,
  as_int,
  as_ints,
  as_text,
  bytes_field,
  double_map,
  int_field,
  packed_ints,
  read_fields,
  text_field,
)

_DTYPES: dict[int, np.dtype] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_FLOAT32 = 1


class ForwardBackwardHeader(NamedTuple):
  """What says to which model a request belongs, and in which place."""

  model_id: str
  seq_id: int
  forward_only: bool


class ForwardBackwardRequest(NamedTuple):
  data: list[Datum]
  forward_only: bool


def read_header(body: bytes) -> ForwardBackwardHeader:
  """Read the fields that number a request, even if what follows them is broken.

  Raises:
    WireError: it has no number.
  """
  model_id = ""
  seq_id = 0
  forward_only = False
  try:
    for number, value in read_fields(body):
      if number == 1:
        model_id = as_text(value)
      elif number == 2:
        seq_id = as_int(value)
      elif number == 6:
        forward_only = as_int(value) != 0
  except WireError:
    if not model_id or not seq_id:
      raise
  if not model_id or not 0 < seq_id < 2**31:
    raise WireError("a request without model_id and seq_id")
  return ForwardBackwardHeader(model_id, seq_id, forward_only)


def read_request(body: bytes) -> ForwardBackwardRequest:
  """Read a forward or forward_backward request.

  Raises:
    WireError: the bytes are not such a message.
    UserError: it asks for what the server does not have.
  """
  loss = ""
  options: dict[str, float] = {}
  older: dict[str, float] = {}
  inputs: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
  for number, value in read_fields(body):
    if number == 3:
      inputs.append(_read_datum(as_bytes(value)))
    elif number == 4:
      loss = as_text(value)
    elif number == 5:
      key, double = as_entry(value)
      older[key] = as_double(double)
    elif number == 7:
      key, variant = as_entry(value)
      options[key] = _read_option(key, as_bytes(variant))
  data = []
  for tokens, arrays in inputs:
    if "target_tokens" not in arrays:
      raise UserError(f"loss {loss} needs target_tokens: add them to the datum's loss_fn_inputs")
    targets = arrays.pop("target_tokens").astype(np.int64)
    others = {name: array.astype(np.float32) for name, array in arrays.items()}
    data.append(Datum(tokens, targets, loss, others, options or older))
  return ForwardBackwardRequest(data, read_header(body).forward_only)


def _read_option(key: str, variant: bytes) -> float:
  for number, value in read_fields(variant):
    if number == 1:
      return as_double(value)
  raise UserError(f"loss_fn_config: {key} must be a number")


def _read_datum(body: bytes) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """(tokens, arrays by name) of a datum."""
  tokens = [np.zeros(0, np.int32)]
  arrays = {}
  for number, value in read_fields(body):
    if number == 1:
      tokens.append(_read_chunk(as_bytes(value)))
    elif number == 2:
      name, tensor = as_entry(value)
      arrays[name] = _read_tensor(name, as_bytes(tensor))
  return np.concatenate(tokens), arrays


def _read_chunk(body: bytes) -> np.ndarray:
  tokens = b""
  for number, value in read_fields(body):
    if number != 1:
      raise UserError("model_input has an image or audio: the server's model reads tokens only")
    for inner, content in read_fields(as_bytes(value)):
      if inner == 1:
        tokens = as_bytes(content)
  return _from_buffer(tokens, np.dtype("<i4"))


def _from_buffer(data: bytes, dtype: np.dtype) -> np.ndarray:
  if len(data) % dtype.itemsize:
    raise WireError("an array that has not a whole number of elements")
  return np.frombuffer(data, dtype)


def _read_tensor(name: str, body: bytes) -> np.ndarray:
  dense: bytes | None = None
  sparse: bytes | None = None
  dtype = 0
  shape: list[int] = []
  for number, value in read_fields(body):
    if number == 1:
      dense = as_bytes(value)
    elif number == 2:
      sparse = as_bytes(value)
    elif number == 3:
      dtype = as_int(value)
    elif number == 4:
      shape += as_ints(value)
  if dtype not in _DTYPES:
    raise UserError(f"{name} has the type {dtype}: send float32 or int64")
  if any(size < 0 for size in shape) or math.prod(shape) > 2**28:
    raise UserError(f"{name} has the shape {shape}: send at most 2**28 elements")
  if sparse is not None:
    return _read_sparse(name, sparse, _DTYPES[dtype], shape)
  values = _from_buffer(dense or b"", _DTYPES[dtype])
  if values.size != math.prod(shape):
    raise UserError(f"{name} has {values.size} elements, but the shape {shape}")
  return values.reshape(shape)


def _read_sparse(name: str, body: bytes, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
  """A matrix in compressed rows as a dense one, zero where it has no element."""
  parts: dict[int, Value] = dict(read_fields(body))
  values = _from_buffer(as_bytes(parts.get(1, b"")), dtype)
  starts = _from_buffer(as_bytes(parts.get(2, b"")), np.dtype("<i8"))
  columns = _from_buffer(as_bytes(parts.get(3, b"")), np.dtype("<i8"))
  is_valid = len(shape) == 2 and len(starts) == shape[0] + 1 and len(values) == len(columns)
  if is_valid:
    counts = np.diff(starts)
    is_valid = starts[0] == 0 and starts[-1] == len(values) and bool(np.all(counts >= 0))
  if not is_valid or np.any((columns < 0) | (columns >= shape[1])):
    raise UserError(f"{name}: its rows, columns and values are not a sparse matrix of {shape}")
  dense = np.zeros(shape, dtype)
  dense[np.repeat(np.arange(shape[0]), counts), columns] = values
  return dense


def write_output(results: Sequence[RowResult]) -> bytes:
  """The ForwardBackwardOutput of the data of a request."""
  parts = [text_field(1, "ArrayRecord")]
  by_shape = itertools.groupby(results, lambda result: result.log_probs.shape[1:])
  for trailing, group in by_shape:
    arrays = [np.ascontiguousarray(result.log_probs, "<f4") for result in group]
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8")
    tensor = (
      bytes_field(1, b"".join(array.tobytes() for array in arrays))
      + bytes_field(2, offsets.tobytes())
      + int_field(3, _FLOAT32)
    )
    if trailing:
      tensor += packed_ints(4, trailing)
    field = bytes_field(2, text_field(1, "logprobs") + bytes_field(2, tensor))
    record = text_field(1, "ArrayRecord") + field + int_field(3, len(arrays))
    parts.append(bytes_field(2, record))
  # In double precision and in order, so that the sum does not depend on chunks of a request.
  parts.append(double_map(3, {"loss:sum": sum(result.loss for result in results)}))
  return b"".join(parts)


class SampledSequence(NamedTuple):
  tokens: list[int]
  log_probs: np.ndarray
  stopped: bool  # by a stop token or string, else by its length


def write_sample(
  sequences: Sequence[SampledSequence], prompt_log_probs: np.ndarray | None
) -> bytes:
  """The SampleResponse of a request; prompt_log_probs are NaN where there is none."""
  parts = []
  for tokens, log_probs, stopped in sequences:
    fields = bytes_field(2, np.asarray(tokens, "<i4").tobytes())
    fields += bytes_field(3, np.asarray(log_probs, "<f4").tobytes())
    parts.append(bytes_field(1, int_field(1, int(not stopped)) + fields))
  if prompt_log_probs is not None:
    parts.append(bytes_field(2, np.asarray(prompt_log_probs, "<f4").tobytes()))
  return b"".join(parts)
