"""From logits to tokens: sampling, beams, masks and log-probabilities."""
