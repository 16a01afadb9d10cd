"""Sessions, schemas and what they keep in the record store."""
