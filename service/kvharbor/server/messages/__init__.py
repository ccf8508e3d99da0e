"""Messages as values, and errors as statuses. Nothing is decided here."""
