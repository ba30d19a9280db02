"""`make gpu`: everything that only a GPU can show, in one command, offline, within a time budget."""
