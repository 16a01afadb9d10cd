"""Tasks: batches and background responses, which routers do for clients that need not wait."""
