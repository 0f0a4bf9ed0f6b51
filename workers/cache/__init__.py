"""Row formats, paged caches in their holder, boundary states."""
