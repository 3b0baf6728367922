"""Data: sources, tokenizer and batches."""

import dataclasses

from maxlite.config.config_field import field, machine_field, model_field
from maxlite.config.raw_values import FrozenMapping
from maxlite.registry import PACKING_STRATEGIES, ROW_ORDERS, SOURCES, TOKENIZERS

# Keys that change the shape of batches during a run.
SCHEDULE_KEYS = ("batch_size_schedule", "sequence_length_schedule")
# The fields of a row of conversations or of pairs, and those of a message.
ROW_FIELDS = (
  "messages",
  "prompt",
  "completion",
  "chosen",
  "rejected",
  "instruction",
  "input",
  "output",
  "tools",
)
MESSAGE_FIELDS = ("role", "content")


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where tokens come from and how they fill batches."""

  dataset_type: str = field(
    "text",
    "Data source; `chat` reads conversations from JSON lines and trains on the assistant's answers "
    "(data/sources/chat.py); `preference` reads pairs of a chosen and a rejected answer for loss "
    "dpo (data/sources/preference.py); `prompts` reads what the model completes for loss grpo "
    "(data/sources/prompts.py); `tokens` reads token ids: .bin with or without the .idx of "
    "Megatron-LM, and .npy (docs/data.md).",
    choices=SOURCES,
  )
  dataset_path: tuple[str, ...] = field(
    ("stdlib",),
    "Files, folders (of which those of dataset_type are read) or globs; `stdlib` is Python's own "
    "standard library source.",
  )
  dataset_mixture: tuple[FrozenMapping, ...] = field(
    (),
    "Weighted sources instead of dataset_path: {name: N, path: [FILES], weight: W} with further "
    "keys, which are below. {name: N, weight: W, from_step: S} changes a weight (docs/data.md).",
  )
  eval_dataset_path: tuple[str, ...] = field(
    (), "Held-out files, folders or globs; empty: a part of dataset_path is held out."
  )
  eval_fraction: float = field(0.05, "Fraction of dataset_path that is held out.", low=0, high=0.9)
  eval_split: str = field(
    "documents",
    "What is held out: whole `documents`, by a hash of their content (if these are too few, the "
    "tail), or the `tail` of each file.",
    choices=("documents", "tail"),
  )
  on_bad_row: str = field(
    "error",
    "Rows that cannot be read (text that is not UTF-8, invalid JSON, nulls, conversations that the "
    "template rejects): `error`, or `skip`, which counts them.",
    choices=("error", "skip"),
  )
  text_column: str = field(
    "text", "Field, column or feature with the text of jsonl, parquet, arrow and array_record data."
  )
  data_columns: FrozenMapping = field(
    FrozenMapping(),
    "{field: column} of conversations and pairs whose columns have other names, such as {messages: "
    "dialog, role: speaker, content: text}; fields of docs/finetune.md, where role and content are "
    "of each message.",
  )
  token_dtype: str = field(
    "",
    "Type of the ids in .bin files that do not state it; empty: uint16.",
    choices=("", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
  )
  document_end_id: int = field(
    -1,
    "Token that ends documents in files of token ids; -1: documents are those of the index, and in "
    "files without one they end at the tokenizer's eos.",
    low=-1,
  )
  megatron_order: bool = field(
    False,
    "Rows of dataset_type=tokens are the samples of Megatron-LM's GPTDataset, in its order, which "
    "data_shuffle_seed and megatron_num_samples select (docs/data.md).",
  )
  megatron_num_samples: int = field(
    0, "Samples that the job of Megatron-LM requests: train_iters x global_batch_size.", low=0
  )
  megatron_split: str = field(
    "969,30,1",
    "Shares of the sequences for training, evaluation and neither, as in Megatron-LM's --split; "
    "with eval_dataset_path, all are trained on.",
  )
  reset_attention_mask: bool = field(
    False, "Attention and positions of megatron_order do not cross document_end_id."
  )
  eod_mask_loss: bool = field(False, "Targets of document_end_id in megatron_order do not count.")
  tokenizer_type: str = model_field("byte", "Tokenizer.", choices=TOKENIZERS)
  tokenizer_path: str = model_field("", "tokenizer.json or SentencePiece model file.")
  chat_template_path: str = field(
    "", "Jinja2 template of conversations; empty: the tokenizer's own."
  )
  add_bos: str = field(
    "auto",
    "Documents of text and raw prompts begin with bos (eos, if the tokenizer has none); `auto`: "
    "with what the tokenizer's files put before a text, which may be nothing.",
    choices=("auto", "true", "false"),
  )
  packing_strategy: str = field(
    "concatenate",
    "Rows of text: documents one after the other, cut at the ends of rows; or `best_fit`, whole "
    "documents where they fit, with padding. Held-out rows are always concatenated.",
    choices=PACKING_STRATEGIES,
  )
  packing: bool = field(
    True, "Pack conversations, and pairs of dataset_type=preference; false: one per row."
  )
  token_cache_directory: str = machine_field(
    "", "Tokenized data; empty: base_output_directory/.tokens."
  )
  tokenization_shard_bytes: int = field(
    0,
    "Training starts when this many bytes of text are tokenized, and each shard of as many is "
    "packed and shuffled by itself, one after the other; 0: all text is tokenized first.",
    low=0,
  )
  max_target_length: int = field(256, "Sequence length in tokens.", low=1)
  max_prefill_predict_length: int = field(
    64, "Tokens of a prompt of dataset_type=prompts at most.", low=1
  )
  per_device_batch_size: float = field(
    8.0, "Rows per device and step; the product with all devices must be whole.", low=0
  )
  global_batch_size: int = field(
    0, "Rows per step on any number of devices; 0: per_device_batch_size x devices.", low=0
  )
  batch_size_schedule: tuple[tuple[int, int], ...] = field(
    (),
    "Rows per step instead of global_batch_size: [[0, 8], [1000, 16]] are 8, and 16 after 1000 "
    "steps.",
  )
  sequence_length_schedule: tuple[tuple[int, int], ...] = field(
    (),
    "Positions per row: [[0, 64], [1000, 256]]. Rows of max_target_length are cut into parts of "
    "this length, so the tokens per step remain.",
  )
  enable_data_shuffling: bool = field(True, "Shuffle documents, and rows in every epoch.")
  data_shuffle_seed: int = field(0, "Seed of the shuffling.", low=0)
  data_sampling: str = field(
    "shuffle",
    "Rows of an epoch: `shuffle` reads each once; `bootstrap` draws as many with replacement.",
    choices=ROW_ORDERS,
  )
  skip_rows: tuple[tuple[int, int], ...] = field(
    (),
    "Rows that are not trained on: [[800, 816]] are rows 800 to 815 of the training rows in their "
    "order, from 0. Later rows take their places (docs/data.md).",
  )
  grain_worker_count: int = field(0, "Grain worker processes; 0: threads of this process.", low=0)
  grain_prefetch_buffer_size: int = field(16, "Batches prefetched.", low=1)
