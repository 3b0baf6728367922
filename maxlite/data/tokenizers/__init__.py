"""Tokenizers: bytes, Hugging Face, SentencePiece."""
