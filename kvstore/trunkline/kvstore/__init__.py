"""Where KV lives: names, layouts and tiers."""
