"""The report on a drive's profile: one HTML page."""
