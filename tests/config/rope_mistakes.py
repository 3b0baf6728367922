"""Mistakes in the keys of the rotary embedding, for test_mistakes.py."""

ROPE_MISTAKES = {
  ("mscale=0.5",): ("rope_type=default (default)", "mscale=0"),
  ("beta_fast=4", "rope_type=llama3.1"): ("only read by yarn", "beta_fast=32"),
  ("rope_attention_factor=2", "rope_type=linear"): ("yarn and longrope", "factor=0"),
  ("rope_type=dynamic", "max_target_length=8192"): ("not supported", "max_target_length=4096"),
  ("rope_type=longrope", "rope_short_factor=[1]"): ("write 16 numbers",),
  ("rope_type=longrope", "rope_short_factor=[1,a]"): ("a list of finite numbers",),
}
