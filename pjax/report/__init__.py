"""What a run found: one JSON record, and that record as tables, as pictures and as a page."""
