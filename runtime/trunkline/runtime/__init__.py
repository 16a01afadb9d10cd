"""What the process of every role needs: its title and parent, status notes, tracing, keys on the wire."""
