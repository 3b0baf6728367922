"""The HTTP server with the OpenAI API."""
