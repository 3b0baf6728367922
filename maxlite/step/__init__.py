"""The state of training and the step that updates it, of runs, phases and ensemble members."""
