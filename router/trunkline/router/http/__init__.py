"""Around the API: connections, access, admission, replay of kept answers."""
