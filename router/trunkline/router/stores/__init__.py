"""Sessions and schemas, kept as records of controllers."""
