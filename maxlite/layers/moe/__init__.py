"""The mixture-of-experts block: router -> send -> grouped matmuls -> return -> weighted sum."""
