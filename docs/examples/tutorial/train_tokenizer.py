"""Train a byte-level BPE tokenizer on a folder of text.

python docs/examples/tutorial/train_tokenizer.py FOLDER tokenizer.json 1024
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

EOS = "<|endoftext|>"  # before and after a document, and ends completions


def main() -> None:
  folder, output, vocab_size = sys.argv[1:]
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=int(vocab_size), special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
  )
  files = sorted(str(file) for file in Path(folder).rglob("*") if file.is_file())
  tokenizer.train(files, trainer)
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{EOS} $A", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
  )
  tokenizer.save(output)
  sys.stdout.write(f"{output}: {tokenizer.get_vocab_size()} tokens from {len(files)} files\n")


if __name__ == "__main__":
  main()
