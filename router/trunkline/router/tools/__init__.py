"""Tool calls: what may be called, how a model is told and held to it, and how its text becomes calls. Pure."""
