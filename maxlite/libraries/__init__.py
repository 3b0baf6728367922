"""Models of any module library as pure functions of their arrays."""
