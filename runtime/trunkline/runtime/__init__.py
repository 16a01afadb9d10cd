"""Parts that the processes of all roles need: title and parent of a process, status reports, tracing, keys on the
wire."""
