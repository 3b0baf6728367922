"""Mistakes in the keys of sparse attention with an indexer, for test_mistakes.py."""

INDEXED = ("decoder_block=deepseek", "use_indexer=true", "q_lora_rank=64")
INDEXER_MISTAKES = {
  ("indexer_loss_scaling_factor=0.5",): ("no indexer", "indexer_loss_scaling_factor=1"),
  ("use_indexer=true",): ("decoder_block=mixtral", "decoder_block=deepseek"),
  ("use_indexer=true", "decoder_block=deepseek"): ("query latent", "q_lora_rank=1536"),
  (*INDEXED, "indexer_head_dim=32"): ("qk_rope_head_dim=64", "indexer_head_dim=64 or more"),
  (*INDEXED, "attention=chunked"): ("attention=chunked", "attention=auto"),
  (*INDEXED, "context_parallel_strategy=ring"): ("use_indexer=true", "all_gather"),
  (*INDEXED, "qk_clip_threshold=100"): ("not measured", "qk_clip_threshold=0"),
}
