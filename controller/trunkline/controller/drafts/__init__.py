"""Where drafts come from, and how long they are: guesses of the next tokens, which a step tries. Pure."""
