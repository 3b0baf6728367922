"""A run's life: open or resume it, train, report, and read it again from its folder."""
