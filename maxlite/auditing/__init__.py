"""`maxlite.audit`: compares the step of a tiny model of a config over meshes and other choices."""
