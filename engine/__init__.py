"""Everything put together: HTTP, text, the core loop, models. Knows all rooms, and not how one works inside."""
