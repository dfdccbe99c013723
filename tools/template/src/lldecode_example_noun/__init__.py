"""One line that says what this makes faster."""
