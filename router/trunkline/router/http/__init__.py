"""The layers around the API: connections, access, admission, replay of kept answers."""
