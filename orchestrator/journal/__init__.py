"""What must outlive the controller: jobs, their events and tokens in SQLite (`journal`, read by `reader`, laid out by
`schema`), prompts as files (`prompts`)."""
