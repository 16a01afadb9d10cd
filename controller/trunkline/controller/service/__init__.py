"""The shell around the engine: sockets to routers and workers, their membership, status and events."""
