"""Text generation: cached decoding, sampling, continuous batching and an HTTP server."""
