"""A member: as a user gives it, as pure functions, and as a run folder."""
