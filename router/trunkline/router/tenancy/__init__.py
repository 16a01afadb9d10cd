"""Keys, tenants, their limits and what they used."""
