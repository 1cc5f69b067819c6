"""Models that no library has, for the suite: each small, seeded and complete."""
