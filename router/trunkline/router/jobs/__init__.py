"""From a checked request to a job of the controller: sampling, decoding and structured output."""
