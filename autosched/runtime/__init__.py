"""Running a schedule. Needs torch and nothing else of autosched but core."""
