"""Make jobs for controllers from checked requests: limits, sampling, decoding, structured output."""
