"""The endpoints of the HTTP API: those of OpenAI and Anthropic, sessions, schemas, and those for operators."""
