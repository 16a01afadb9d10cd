"""Text to tokens and back: templates, tokenizers, stop strings, truncation."""
