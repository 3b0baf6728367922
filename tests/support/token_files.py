"""Token files, written from the descriptions of their formats."""

import struct
from collections.abc import Sequence
from pathlib import Path

INDEX_TYPES = {
  "uint8": (1, "B"),
  "int8": (2, "b"),
  "int16": (3, "h"),
  "int32": (4, "i"),
  "int64": (5, "q"),
  "uint16": (8, "H"),
}
# Ids of a document, by sequence.
Document = Sequence[Sequence[int]]


def write_indexed(path: Path, documents: Sequence[Document], dtype: str = "int32") -> Path:
  """Write `path`.bin and `path`.idx of Megatron-LM; return the former.

  The index has, in little endian: 9 bytes MMIDIDX, the version (uint64), the type of the ids
  (uint8), the numbers of sequences and of document ends (uint64), the length of each sequence
  (int32), its first byte (int64), and the number of sequences before each document and in all
  (int64).
  """
  code, letter = INDEX_TYPES[dtype]
  content = b""
  lengths, places, ends = b"", b"", struct.pack("<q", 0)
  num_sequences = 0
  for document in documents:
    for sequence in document:
      lengths += struct.pack("<i", len(sequence))
      places += struct.pack("<q", len(content))
      for token in sequence:
        content += struct.pack(f"<{letter}", token)
      num_sequences += 1
    ends += struct.pack("<q", num_sequences)
  header = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
  counts = struct.pack("<Q", num_sequences) + struct.pack("<Q", len(documents) + 1)
  file = path.with_suffix(".bin")
  file.write_bytes(content)
  path.with_suffix(".idx").write_bytes(header + counts + lengths + places + ends)
  return file
