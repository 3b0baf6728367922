"""Mixture of experts: router -> dispatch -> grouped matmuls -> combine -> weighted sum."""
