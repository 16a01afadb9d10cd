"""Names, layouts and tiers of KV."""
