"""The record store: sessions, schemas and kept answers, shared by routers."""
