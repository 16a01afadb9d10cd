"""The dashboard: a page, its assets, and the JSON endpoints behind it."""
