"""Text to tokens and back: chat templates, tokenizers, stop strings, truncation."""
