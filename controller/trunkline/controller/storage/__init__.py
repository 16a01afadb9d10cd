"""What a controller keeps in SQLite: the index of the disk tier."""
