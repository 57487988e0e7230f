"""What each command does, apart from how its options are read. No module here knows typer."""
