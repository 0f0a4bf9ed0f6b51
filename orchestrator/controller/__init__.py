"""The controller: many jobs over several groups, a journal that no job is lost from, and what others may ask of it."""
