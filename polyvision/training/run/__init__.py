"""The folder of a run: place, lock, state, checkpoints, what a resumed run restores."""
