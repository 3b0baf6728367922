"""What processes send each other arrives as it was sent, in pieces and of uneven lengths."""

import json
import socket
import subprocess
import sys

import pytest

from maxlite.distributed.object_collectives import all_gather_object

SIZES = [(16 << 20) + 5, 3, 40 << 20]  # [bytes] of each process: more than a piece, and less
PROCESS = """
import hashlib, json, sys
import jax, numpy as np
rank, address, sizes = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, len(sizes), rank)
from maxlite.distributed.object_collectives import broadcast_bytes, all_gather_object, shift_bytes
data = lambda n: np.random.default_rng(n).integers(256, size=sizes[n], dtype=np.uint8)
assert all_gather_object({"rank": rank, "text": "x" * 99 * rank}) == [
  {"rank": n, "text": "x" * 99 * n} for n in range(len(sizes))]
for source in range(len(sizes)):
  own = data(rank) if rank == source else None
  assert np.array_equal(broadcast_bytes(own, source, sizes[source]), data(source))
for distance in (1, 2):
  peer = (rank - distance) % len(sizes)
  assert np.array_equal(shift_bytes(data(rank), sizes[peer], distance), data(peer))
"""


def test_a_process_alone_hears_itself():
  assert all_gather_object({"a": [1, None]}) == [{"a": [1, None]}]


@pytest.mark.slow
def test_what_is_sent_arrives():
  with socket.create_server(("127.0.0.1", 0)) as listener:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
  command = [sys.executable, "-c", PROCESS]
  running = [
    subprocess.Popen([*command, str(rank), address, json.dumps(SIZES)], stderr=subprocess.PIPE)
    for rank in range(len(SIZES))
  ]
  ended = [process.communicate(timeout=300)[1] for process in running]
  assert [process.returncode for process in running] == [0] * len(SIZES), ended
