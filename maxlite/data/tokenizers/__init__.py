"""Tokenizers: bytes, Hugging Face and SentencePiece."""
