"""The HTTP surface: OpenAI-compatible endpoints and the ones people operate a cluster with."""
