"""Grammars of structured output: checked, compiled on trial, cached."""
