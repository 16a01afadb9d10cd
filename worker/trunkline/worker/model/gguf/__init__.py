"""GGUF files: one file that holds a model's metadata, its tokenizer and its weights, quantised in blocks."""
