"""Tool calls: the functions a client offers, the grammar of calls, and parsers from text to calls. Pure."""
