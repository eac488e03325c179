"""Crash-safe file updates, and JSON files with a checksum."""
